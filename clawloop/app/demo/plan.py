"""Parses and checks the options of `clawloop demo run` into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.app.demo.recipes import Method
from clawloop.app.demo.world import Axis
from clawloop.core.errors import SetupError

SEED_LIMIT = 2**32
# A thousand interactions take two hours on two cores; more is probably a typing error.
MAX_INTERACTIONS = 1000
MAX_RUNS = 100
INTERACTIONS = 64
# 96 interactions before the flip and 96 after it.
INTERACTIONS_WITH_FLIP = 192
TOY_METHOD, MODEL_METHOD = Method.COMBINED, Method.HINDSIGHT
_ALL_AXES = "all"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One synthetic user with one method, starting from the base model."""

    seed: int
    method: Method

    @property
    def policy(self) -> str:
        """The name of the run's policy, which no other run uses."""
        return f"demo-{self.seed}-{self.method}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a demo, and their settings.

    Args:
        interactions: main turns of each run.
        paced: the user waits between two rounds of sessions until every turn is learned.
        flip: the axes on which the user prefers the other style from half-way on.
        model: name of the model that learns; None: the toy.
        measure_every: evaluate only every n-th version and the last one, except during the first 128 interactions
            and the first 128 after a flip.
    """

    runs: tuple[PlannedRun, ...]
    interactions: int
    paced: bool
    flip: tuple[Axis, ...] = ()
    measure_every: int = 1
    model: str | None = None


def plan(
    seeds: str | None,
    seed: str | None,
    methods: str | None,
    interactions: int | None,
    *,
    paced: bool,
    batch: int,
    flip: str | None = None,
    measure_every: int = 1,
    model: str | None = None,
) -> Plan:
    """Return the plan for the given options.

    Args:
        seeds: a count (`10` for 1 to 10), or a comma-separated list.
        seed: a single seed; 1 if neither is given.
        methods: comma-separated; None: `combined` with the toy, and `hindsight` with a model, which has no judge.
        interactions: 64 if not given, 192 with a flip.
        batch: samples in a step.
        flip: comma-separated axes, or `all`; only with the toy.
        model: as in `Plan`.

    Raises:
        SetupError: an option is invalid; the message names it and the values it takes.
    """
    if seeds is not None and seed is not None:
        raise SetupError("--seed and --seeds: give one of them")
    chosen = _seeds(seeds) if seeds is not None else (_number(seed or "1", "--seed"),)
    axes = () if flip is None else _axes(flip)
    if model is not None and axes:
        raise SetupError("--flip: only with --quick, the toy; a user of a pretrained model has one taste, which stays")
    chosen_methods = _methods(methods if methods is not None else TOY_METHOD if model is None else MODEL_METHOD)
    if (model is None) is (MODEL_METHOD in chosen_methods) or (model is not None and len(chosen_methods) > 1):
        raise SetupError(
            f"--methods {methods}: with a pretrained model it is {MODEL_METHOD} alone, which asks no judge;"
            " --quick has the others"
        )
    if interactions is None:
        interactions = INTERACTIONS_WITH_FLIP if axes else INTERACTIONS
    if not batch <= interactions <= MAX_INTERACTIONS:
        raise SetupError(
            f"--interactions {interactions}: give {batch} to {MAX_INTERACTIONS}; a step takes {batch} samples"
        )
    if axes and interactions < 2 * batch:
        raise SetupError(
            f"--flip with --interactions {interactions}: give {2 * batch} or more; each half needs {batch} samples"
        )
    if measure_every < 1:
        raise SetupError(f"--measure-every {measure_every}: give 1 for each version, 4 for every fourth")
    # All methods for one user before the next user, so that an interrupted demo can still compare methods.
    runs = tuple(PlannedRun(number, method) for number in chosen for method in chosen_methods)
    if len(runs) > MAX_RUNS:
        raise SetupError(f"{len(runs)} runs: at most {MAX_RUNS} at a time; give fewer --seeds or --methods")
    return Plan(runs, interactions, paced, axes, measure_every, model)


def _seeds(text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1:
        count = _number(parts[0], "--seeds")
        if count == 0:
            raise SetupError("--seeds 0: give how many seeds (10 is 1 to 10), or a list such as 3,5,8")
        return range(1, min(count, MAX_RUNS + 1) + 1)
    numbers = [_number(part, "--seeds") for part in parts if part]
    return list(dict.fromkeys(numbers))


def _number(text: str, option: str) -> int:
    # int() would also accept " 1_0 " and Arabic digits.
    if not (text.isascii() and text.isdigit()) or int(text) >= SEED_LIMIT:
        raise SetupError(f"{option} {text!r}: a seed is a whole number from 0 to {SEED_LIMIT - 1}")
    return int(text)


def _methods(text: str) -> list[Method]:
    chosen = []
    for word in dict.fromkeys(part.strip() for part in text.split(",")):
        if word not in set(Method):
            raise SetupError(f"--methods {word!r}: use {', '.join(Method)}, or several with commas")
        chosen.append(Method(word))
    return chosen


def _axes(text: str) -> tuple[Axis, ...]:
    if text.strip() == _ALL_AXES:
        return tuple(Axis)
    words = {part.strip() for part in text.split(",")}
    if unknown := sorted(words - set(Axis)):
        raise SetupError(f"--flip {unknown[0]!r}: use {', '.join(Axis)}, several with commas, or {_ALL_AXES}")
    return tuple(axis for axis in Axis if axis in words)
