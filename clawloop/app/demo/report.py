"""The record of one demo run, as written to `demo-report.json`; docs/demo.md defines every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.sessions import TasteFindings
from clawloop.app.demo.world import EVALUATION

GOAL = 0.9
"""The match rate that a run should reach."""
MEAN_WINDOW = 3
"""Evaluations averaged for `match_held` and `match_kept`: a single one, of 60 sampled answers, is noisy."""
LEARNED = 0.95
"""The mean match rate that a run should keep once it has it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One version's answers to the fixed requests.

    Args:
        interactions: count at the time of the evaluation.
        reward: mean verdict of the turns judged since the previous evaluation; None if there were none.
        match: share of answers in the preferred style, or taste.
        exact: share of answers with the right content.
        requests, words, cut, loops: as in `Scores`.
        failed: failed requests so far.
        seconds: since the run began.
        flipped: graded by the preference after the flip.
    """

    step: int
    version: int
    interactions: int
    reward: float | None
    match: float
    exact: float
    failed: int
    seconds: float
    flipped: bool = False
    requests: int = len(EVALUATION)
    words: float | None = None
    cut: float | None = None
    loops: int | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run in `demo-report.json`.

    Args:
        interactions: user requests in main turns.
        interactions_to_90: interactions at the first evaluation that reached the goal; None if none reached it before
            the flip.
        match_held: lowest mean match of three consecutive evaluations after that one and before the flip; None if
            there were fewer. What is learned between 90 and 95 % counts as well.
        match_kept: lowest mean match of three consecutive evaluations from the first such mean of 95 % on and before
            the flip; None if no mean reached it.
        exact_rate: share of right content at the last evaluation; exact_least: at the worst evaluation.
        requests_failed: HTTP answers of 400 and above, and broken streams, before any retry.
        versions: trained versions; steps: training steps that used turns of the run.
        seconds: from the first request until nothing was left to learn.
        seconds_setup: before the first request: creating the environment, if needed, and starting all parts.
        flipped_at: interactions before the preference flipped; None without a flip.
        relearned_after: interactions from the flip until an evaluation reached the goal again; None if none did.
        paced, measure_every: as in `Plan`.
        stopped: why the run ended early; None if it did not.
        faults: parts killed during the run, with how often; empty without `--faults`.
        rejected: trained versions that the gate rejected; probed: those that were asked the gate's probes.
        gave_up: why the run first went on before every turn was stored and learned; None if it never did.
        recorded: interactions whose turns were stored when the run ended. In each session not more than its requests:
            one that was sent again may be stored twice. None if it was not counted.
        evaluations: in order; the first is of version 0, the frozen model.
        model: name of the model; None: the toy. taste: what else was found with it; None with the toy.
    """

    seed: int
    method: str
    interactions: int
    match_before: float
    match_after: float
    interactions_to_90: int | None
    match_held: float | None
    exact_rate: float
    exact_least: float
    requests_failed: int
    versions: int
    steps: int
    seconds: float
    seconds_setup: float
    flipped_at: int | None
    relearned_after: int | None
    paced: bool
    measure_every: int
    stopped: str | None
    faults: dict[str, int]
    rejected: int
    probed: int
    match_kept: float | None
    gave_up: str | None
    recorded: int | None
    evaluations: tuple[Evaluation, ...]
    model: str | None = None
    taste: TasteFindings | None = None


@dataclass(frozen=True, slots=True)
class RunTotals:
    """The figures of a whole run that are not part of an evaluation; see `RunReport`.

    Args:
        failed: failed requests.
        flipped_at: None without a flip.
        stopped: None if the run did not end early.
        faults, gave_up, recorded, taste: as in `RunReport`.
    """

    interactions: int
    failed: int
    versions: int
    steps: int
    seconds: float
    flipped_at: int | None = None
    stopped: str | None = None
    faults: Mapping[str, int] = field(default_factory=dict)
    rejected: int = 0
    probed: int = 0
    gave_up: str | None = None
    recorded: int | None = None
    taste: TasteFindings | None = None


def report_run(
    plan: Plan, run: PlannedRun, evaluated: Sequence[Evaluation], totals: RunTotals, seconds_setup: float
) -> RunReport:
    """Return the report of a finished run.

    Args:
        evaluated: in order; the first is of version 0.
    """
    first, last = evaluated[0], evaluated[-1]
    before_flip = [evaluation for evaluation in evaluated if not evaluation.flipped]
    means = _means_after_goal(before_flip)
    learned = next((at for at, mean in enumerate(means) if mean >= LEARNED), len(means))
    goal_after_flip = _interactions_at_goal([evaluation for evaluation in evaluated if evaluation.flipped])
    return RunReport(
        seed=run.seed,
        method=run.method.value,
        interactions=totals.interactions,
        match_before=round(first.match, 3),
        match_after=round(last.match, 3),
        interactions_to_90=_interactions_at_goal(before_flip),
        match_held=_lowest(means),
        exact_rate=round(last.exact, 3),
        exact_least=round(min(evaluation.exact for evaluation in evaluated), 3),
        requests_failed=totals.failed,
        versions=totals.versions,
        steps=totals.steps,
        seconds=round(totals.seconds, 1),
        seconds_setup=round(seconds_setup, 1),
        flipped_at=totals.flipped_at,
        relearned_after=None
        if goal_after_flip is None or totals.flipped_at is None
        else goal_after_flip - totals.flipped_at,
        paced=plan.paced,
        measure_every=plan.measure_every,
        stopped=totals.stopped,
        evaluations=tuple(_round(evaluation) for evaluation in evaluated),
        faults=dict(totals.faults),
        rejected=totals.rejected,
        probed=totals.probed,
        match_kept=_lowest(means[learned:]),
        gave_up=totals.gave_up,
        recorded=totals.recorded,
        model=plan.model if plan.model is None else Path(plan.model).name,
        taste=totals.taste,
    )


def _interactions_at_goal(evaluated: Sequence[Evaluation]) -> int | None:
    return next((evaluation.interactions for evaluation in evaluated if evaluation.match >= GOAL), None)


def _means_after_goal(evaluated: Sequence[Evaluation]) -> list[float]:
    """The mean match of each three evaluations in a row after the first that reached the goal."""
    reached = next((at for at, evaluation in enumerate(evaluated) if evaluation.match >= GOAL), len(evaluated))
    after = [evaluation.match for evaluation in evaluated[reached + 1 :]]
    # Rounded, as 171 of 180 answers are 95 %.
    return [round(fmean(after[at : at + MEAN_WINDOW]), 6) for at in range(len(after) - MEAN_WINDOW + 1)]


def _lowest(means: Sequence[float]) -> float | None:
    return round(min(means), 3) if means else None


def _round(evaluation: Evaluation) -> Evaluation:
    reward = None if evaluation.reward is None else round(evaluation.reward, 3)
    return replace(
        evaluation,
        reward=reward,
        match=round(evaluation.match, 3),
        exact=round(evaluation.exact, 3),
        words=None if evaluation.words is None else round(evaluation.words, 1),
        cut=None if evaluation.cut is None else round(evaluation.cut, 3),
        seconds=round(evaluation.seconds, 1),
    )
