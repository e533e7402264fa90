"""The gate: its checks of a version, one row each, and the decision by what they found.

Each queue makes the checks for which it has the evidence: the trainer about the step that it computed, the judge worker
about the answers to probes, the sweep about a canary's sessions. The orchestrator decides by a version's stored checks.
A further check is a row here, and the function that the row names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawloop.core.contracts.training import SECONDS, CheckResult, GateCheck, StepBatch, TrainedStep
from clawloop.core.gate.canary import CANARY, JudgedSessions, check_canary
from clawloop.core.gate.checks import (
    NUMBERS,
    PROBES,
    REPLAY,
    AskedProbes,
    check_asked,
    check_numbers,
    check_replay,
    lacking_turns,
)
from clawloop.core.recipes.recipe import Gate

Evidence = TypeVar("Evidence")


@dataclass(frozen=True, slots=True)
class Check(Generic[Evidence]):
    """
    Args:
        name: in PostgreSQL, the API and the page.
        find: what the check finds by its evidence and the recipe's limits; None: nothing yet, or the recipe does not
            ask for it.
        shown: the figures for which a row of the Temporal UI has room; the API, commands and page show all.
    """

    name: str
    find: Callable[[Evidence, Gate], GateCheck | None]
    shown: Sequence[str]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    batch: StepBatch
    trained: TrainedStep


def _numbers(step: ComputedStep, gate: Gate) -> GateCheck:
    figures = step.trained.figures
    return check_numbers(figures, gate).timed(figures.distance_seconds)


def _replay(step: ComputedStep, gate: Gate) -> GateCheck | None:
    if not gate.held_out:
        return None
    trained = step.trained
    if (lacking := lacking_turns(step.batch.verdicts_and_units)) is not None:
        return lacking.timed(trained.held_out_seconds)  # and none was scored
    check = check_replay(trained.held_out, seed=trained.version.sha256)
    if unscored := len(step.batch.held_out) - len(trained.held_out):
        check = check.noting(f"{unscored} turns were too long to score, or memory ran out")
    return check.timed(trained.held_out_seconds)


BY_TRAINER: Sequence[Check[ComputedStep]] = (
    Check(NUMBERS, _numbers, ("loss", "grad_norm", "parent_distance", "token_share", "base_distance", SECONDS)),
    Check(REPLAY, _replay, ("praised", "blamed", "change", "upper_bound", SECONDS)),
)
BY_PROBES: Sequence[Check[AskedProbes]] = (
    Check(
        PROBES,
        check_asked,
        ("asked", "right", "parent_right", "base_right", "compared", "preferred", "parent_preferred", SECONDS),
    ),
)
BY_SESSIONS: Sequence[Check[JudgedSessions]] = (
    Check(CANARY, check_canary, ("sessions", "other_sessions", "change", "radius")),
)
_SHOWN = {check.name: check.shown for checks in (BY_TRAINER, BY_PROBES, BY_SESSIONS) for check in checks}


def found(checks: Sequence[Check[Evidence]], evidence: Evidence, gate: Gate) -> list[GateCheck]:
    """The results of these checks."""
    return [each for check in checks if (each := check.find(evidence, gate)) is not None]


def decide(checks: Sequence[GateCheck]) -> str | None:
    """The reason for which a version is rejected; None: it is accepted.

    A check with too little to decide by rejects nothing.
    """
    failed = [f"{check.name}: {check.reason}" for check in checks if check.result is CheckResult.FAILED]
    return "; ".join(failed) or None


def summary(checks: Sequence[GateCheck]) -> str:
    """The checks and the figures each was decided by in one line, e.g. `numbers passed: loss 0.1, grad_norm 0.02`."""
    return "; ".join(f"{check.name} {check.result.replace('_', ' ')}{_figures(check)}" for check in checks)


def _figures(check: GateCheck) -> str:
    shown = _SHOWN.get(check.name, ())
    known = [f"{name} {value:.3g}" for name in shown if (value := check.figures.get(name)) is not None]
    return f": {', '.join(known)}" if known else ""
