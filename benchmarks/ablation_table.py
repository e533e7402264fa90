"""The variants of the demo's ablation, what their users are compared by, and the part of a document that has the table.

Imports no torch, so that a test can compare the document with the committed lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from clawloop.errors import SetupError

_DISTILLED = ["train.loss.distillation=0.2", "train.distillation.top_k=8", "train.distillation.top_k_of=teacher"]
VARIANTS: Mapping[str, Sequence[str]] = {
    "as it is": [],
    "opd_clip 1": ["train.advantage.opd_clip=1"],
    "opd_clip 4": ["train.advantage.opd_clip=4"],
    "w_opd 0, no hints": ["train.advantage.teacher_weight=0", "signal.hints=false"],
    "w_opd 0.5": ["train.advantage.teacher_weight=0.5"],
    "w_opd 2": ["train.advantage.teacher_weight=2"],
    "kl 0": ["train.loss.kl=0"],
    "kl 0.02": ["train.loss.kl=0.02"],
    "beta1 0.9": ["train.optimiser.beta1=0.9"],
    "beta2 0.999": ["train.optimiser.beta2=0.999"],
    "grad_clip 1": ["train.optimiser.grad_clip=1"],
    "baseline mean": ["signal.baseline=mean"],
    "spare_unlikely 0": ["train.advantage.spare_unlikely=0"],
    "spare_unlikely 0.5": ["train.advantage.spare_unlikely=0.5"],
    "reverse divergence 0.2": _DISTILLED,
    "forward divergence 0.2": [*_DISTILLED, "train.distillation.divergence=forward"],
}
"""Settings that each variant changes; the first changes none."""
BASE = next(iter(VARIANTS))
BEGIN, END = "<!-- ablation: written by benchmarks.demo_ablation -->", "<!-- ablation: end -->"
_NOT_RUN = "It has not been run: no default but `spare_unlikely` follows it yet."
# Of Student's t, two-sided 95 %, for so many degrees of freedom; 1.96 beyond.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a user's run is compared by, as shares.

    Args:
        whole: match of the version that answered, mean over all interactions: how soon it learned, and what held.
        last: mean match of the last three versions.
        content: least right content of any version.
    """

    whole: float
    last: float
    content: float

    @classmethod
    def of(cls, run: Mapping[str, Any], interactions: int) -> Figures:
        """
        Args:
            run: a `RunReport` as JSON.
            interactions: that were planned; where training paused before, the last version goes on answering.
        """
        rows = run["evaluations"]
        until = [*(row["interactions"] for row in rows[1:]), interactions]
        answered = [(end - row["interactions"]) * row["match"] for row, end in zip(rows, until, strict=True)]
        return cls(sum(answered) / interactions, fmean(row["match"] for row in rows[-3:]), run["exact_least"])

    def values(self) -> tuple[float, float, float]:
        return self.whole, self.last, self.content


def by_variant(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The lines by variant and seed.

    Raises:
        SetupError: lines of a variant are of several recipes, or differ in interactions: they cannot be compared.
    """
    found: defaultdict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    recipes: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        recipes[line["variant"]].add(line["recipe"])
        found[line["variant"]][line["run"]["seed"]] = line
    mixed = [variant for variant, hashes in recipes.items() if len(hashes) > 1]
    if mixed or len({line["interactions"] for line in lines}) > 1:
        why = f"{mixed[0]!r} was run with several recipes" if mixed else "users have different numbers of interactions"
        raise SetupError(f"the lines cannot be compared: {why}; give another --out")
    return dict(found)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval; NaN for fewer than two values."""
    if len(values) < 2:
        return fmean(values) if values else math.nan, math.nan
    freedom = len(values) - 1
    factor = _T[max(known for known in _T if known <= freedom)] if freedom <= 19 else 1.96
    return fmean(values), factor * stdev(values) / math.sqrt(len(values))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown: plain figures of the first row, differences of the same users to it in the others.

    Raises:
        SetupError: the lines cannot be compared.
    """
    found = by_variant(lines)
    figures = {
        variant: {seed: Figures.of(line["run"], line["interactions"]) for seed, line in users.items()}
        for variant, users in found.items()
    }
    base = figures.get(BASE, {})
    heads = [
        "variant",
        "users",
        "match, all interactions",
        "match, last three versions",
        "least right content",
        "paused",
    ]
    rows = [heads, ["---"] * len(heads)]
    for variant in (name for name in VARIANTS if name in figures):
        users = figures[variant]
        shared = sorted(users if variant == BASE else users.keys() & base.keys())
        cells = []
        for at in range(3):
            values = [users[seed].values()[at] - (0 if variant == BASE else base[seed].values()[at]) for seed in shared]
            mean, half = interval(values)
            cells.append(f"{mean:.1%} ± {half:.1%}" if variant == BASE else f"{mean:+.1%} ± {half:.1%}")
        paused = sum(found[variant][seed]["run"]["stopped"] is not None for seed in shared)
        rows.append([variant, str(len(shared)), *cells, str(paused)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def section(lines: Sequence[Mapping[str, Any]], recipe: str) -> str:
    """The part of the document between its two marks.

    Args:
        recipe: hash of the demo's recipe as it is now.

    Raises:
        SetupError: the lines cannot be compared.
    """
    if not lines:
        return _NOT_RUN
    found = by_variant(lines)
    seeds = sorted({seed for users in found.values() for seed in users})
    (base,) = {line["recipe"] for line in found[BASE].values()} if BASE in found else {""}
    changed = "" if base == recipe else " The demo's recipe has changed since then."
    told = (
        f"Measured with {len(seeds)} users (seeds {seeds[0]} to {seeds[-1]}), {lines[0]['interactions']} interactions "
        f"each, beside the recipe {base[:12]}.{changed} The first row has its own figures, the others differences of "
        "the same users to it, with 95 % intervals of the mean (Student's t, paired): of so many, one in twenty "
        "excludes 0 by chance. *Paused*: users whose training paused after three rejected steps in a row. The raw "
        "lines are in [demo/ablation.jsonl](demo/ablation.jsonl)."
    )
    return f"{told}\n\n{table(lines)}"


def with_section(document: str, lines: Sequence[Mapping[str, Any]], recipe: str) -> str:
    """The document with its part of the ablation written anew.

    Raises:
        SetupError: it has not both marks once, or the lines cannot be compared.
    """
    before, begin, rest = document.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not (begin and end) or BEGIN in after:
        raise SetupError(f"the document needs a line {BEGIN!r} and a later line {END!r}")
    return f"{before}{begin}{section(lines, recipe)}{end}{after}"


def write_section(document: Path, lines: Sequence[Mapping[str, Any]], recipe: str) -> None:
    """Write the document's part of the ablation anew.

    Raises:
        SetupError: as `with_section`.
    """
    document.write_text(with_section(document.read_text(encoding="utf-8"), lines, recipe), encoding="utf-8")
