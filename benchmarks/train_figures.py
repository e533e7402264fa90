"""Results of a comparison of training steps, as rows and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Figure, Ratio, Result
from benchmarks.train_case import Family

# The most that a token may cost in the largest batch, beside the smallest: two medians differ by some per cent.
LINEAR = 1.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The contenders of one comparison, and the shape of its samples.

    Args:
        family, title: the model's.
        contenders: ours first.
        is_session: the samples are the turns of one session; else they have nothing in common.
        has_sizes: it is made with each number of samples, not with the largest alone.
        by_hints: the contenders differ by the hints of each sample, so that their steps are not the same.
    """

    family: Family
    title: str
    contenders: tuple[str, ...]
    is_session: bool = False
    has_sizes: bool = False
    by_hints: bool = False


@dataclass(frozen=True)
class Cost:
    """The cost of a contender's step.

    Args:
        wall_seconds, cpu_seconds: medians.
        peak_bytes: peak RSS (on a GPU: peak allocated by torch) since the model was loaded.
        step_bytes: peak beyond the loaded model; on the CPU, tensors only.
    """

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: float
    step_bytes: float


@dataclass(frozen=True)
class Found:
    """Result of one comparison with one batch.

    Args:
        tokens: of all samples; flops: of a step, None: not counted.
        off: the largest difference of losses.
        raw: seconds of each timed step.
        told: what was found beside the costs, and ratios of it.
    """

    comparison: Comparison
    samples: int
    tokens: int
    costs: Sequence[Cost]
    off: float
    raw: Mapping[str, Sequence[float]]
    flops: float | None = None
    told: Sequence[str] = ()
    ratios: Mapping[str, Ratio] | None = None

    @property
    def name(self) -> str:
        return f"{self.comparison.title}, {self.samples} {'turns' if self.comparison.is_session else 'samples'}"


def result_of(found: Sequence[Found], peak_flops: float | None = None) -> Result:
    """
    Args:
        peak_flops: of the GPU a second, None: unknown.
    """
    rows: list[dict[str, Figure]] = []
    ratios: dict[str, Ratio] = {}
    for one in found:
        ours, *others = one.costs
        for cost in one.costs:
            known = peak_flops is not None and one.flops is not None
            rows.append(
                {
                    "comparison": one.comparison.title,
                    "samples": one.samples,
                    "tokens": one.tokens,
                    "trainer": cost.name,
                    "s/step": cost.wall_seconds,
                    "CPU s/step": cost.cpu_seconds,
                    "tokens/s": one.tokens / cost.wall_seconds,
                    "peak MiB": cost.peak_bytes / 2**20,
                    "the step's MiB": cost.step_bytes / 2**20,
                    "MFU": (one.flops or 0.0) / cost.wall_seconds / (peak_flops or 1.0) if known else None,
                }
            )
        for other in others if not one.comparison.by_hints else ():
            for what, ratio in {
                "time": ours.wall_seconds / other.wall_seconds,
                "CPU time": ours.cpu_seconds / other.cpu_seconds,
                "peak": ours.peak_bytes / other.peak_bytes,
                "the step's memory": ours.step_bytes / other.step_bytes,
            }.items():
                ratios[f"{one.name}: {what}, ours to {other.name}"] = Ratio(ratio, "lower")
        ratios |= {f"{one.name}: {name}": ratio for name, ratio in (one.ratios or {}).items()}
    ratios |= _growth([one for one in found if one.comparison.has_sizes])
    raw = {f"{one.name}: {name}": seconds for one in found for name, seconds in one.raw.items()}
    return Result(rows, ratios, raw, [line for one in found for line in (one.name, *one.told)])


def hints_beside_none(costs: Sequence[Cost]) -> tuple[list[str], dict[str, Ratio]]:
    """What hints cost beside the first of these costs, which has none, as lines and ratios."""
    none, *others = costs
    told = [f"{none.name}: {none.wall_seconds:.3g} s a step, {none.cpu_seconds:.3g} s of CPU"]
    ratios: dict[str, Ratio] = {}
    for cost in others:
        wall, cpu = cost.wall_seconds / none.wall_seconds, cost.cpu_seconds / none.cpu_seconds
        told.append(
            f"{cost.name}: {cost.wall_seconds:.3g} s a step, {wall:.2f} times; {cost.cpu_seconds:.3g} s of CPU, "
            f"{cpu:.2f} times"
        )
        ratios |= {
            f"time of {cost.name} to none": Ratio(wall, "lower"),
            f"CPU time of {cost.name} to none": Ratio(cpu, "lower"),
        }
    return told, ratios


def _growth(by_size: Sequence[Found]) -> dict[str, Ratio]:
    """Cost of a token in the largest batch, relative to the smallest: the same, if the cost is linear."""
    if len(by_size) < 2:
        return {}
    least, most = by_size[0], by_size[-1]
    name = f"{most.comparison.title}, {most.samples} samples to {least.samples}"
    a_token = [(one.costs[0].wall_seconds / one.tokens, one.costs[0].cpu_seconds / one.tokens) for one in (least, most)]
    return {
        f"{name}: {what} a token": Ratio(of_most / of_least, "lower", LINEAR, enough=1.0)
        for what, of_least, of_most in zip(("time", "CPU time"), *a_token, strict=True)
    }
