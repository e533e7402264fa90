"""The page says what each state and figure of a version means, and nothing twice."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from api.ui.wording import FIGURES, STATES, code, detail_words, event_words, meaning_of, why, words_of
from clawloop.core.contracts.training import HeldOutScore, StepState, TrainedStep, VersionRef
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.gate.canary import JudgedSessions, check_canary
from clawloop.core.gate.checks import check_numbers, check_probes, check_replay
from clawloop.core.recipes.recipe import Gate
from db.training.operators import version_place
from db.training.steps import metrics_of
from tests.unit.gate.test_gate import HEALTHY


def shown_figures() -> list[Mapping[str, object]]:
    """What the gate and a step measure, as the page lists it."""
    sessions = [0.5, -0.5] * 20
    canary = check_canary(JudgedSessions(sessions, sessions, 100.0), Gate(canary_hours=1.0))
    assert canary is not None
    version = VersionRef(policy="default", n=1, parent=0, path="v1", sha256="0")
    trained_step = TrainedStep(version=version, figures=HEALTHY, seconds=1.0)
    metrics = metrics_of(trained_step)
    turns = [HeldOutScore(verdict, -1.0, -0.9) for verdict in (1, -1) * 40]
    checks = [check_numbers(HEALTHY, Gate()), check_replay(turns, "a"), check_probes([]), canary]
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return [numbers, *(check.figures for check in checks)]


def test_each_figure_is_explained() -> None:
    shown = {name for figures in shown_figures() for name in figures} | {"moves_seconds"}
    assert shown == FIGURES.keys()


@pytest.mark.parametrize("state", [None, *StepState])
def test_each_state_is_explained(state: StepState | None) -> None:
    for n in (1, 2, 3):
        place = version_place(n, 2, [0, 1, 2], state, "rejected: too far, much too far")
        assert set(words_of([f"active, pinned, canary, {place}, files removed"])) >= {
            "active",
            "pinned",
            "canary",
            place.split(":")[0],
            "files removed",
        }


def test_a_state_is_explained_by_its_words_and_not_by_its_reason() -> None:
    assert list(words_of(["rejected: head, active"])) == ["rejected"]
    assert list(words_of(["rejected: head, active, files removed"])) == ["rejected", "files removed"]
    assert meaning_of("active, head") == f"active: {STATES['active']}; head: {STATES['head']}"


def test_the_reason_says_no_words_of_the_outcome_again() -> None:
    assert why("nothing followed: idle for 30 min", TurnOutcome.NO_FEEDBACK) == "idle for 30 min"
    assert why("nothing followed", TurnOutcome.NO_FEEDBACK) == ""
    assert why("answer not in later history", TurnOutcome.NO_FEEDBACK) == "answer not in later history"


def test_events_are_told_in_words() -> None:
    assert [event_words(kind) for kind in ("quarantined", "rolled_back")] == [
        "replies left out of training",
        "rolled back",
    ]
    assert [detail_words(name) for name in ("to", "task_kind")] == ["to version", "task kind"]


def test_what_stands_between_backticks_is_code() -> None:
    assert code("Start `clawloop up`, or `<x>`.") == "Start <code>clawloop up</code>, or <code>&lt;x&gt;</code>."
    assert code("<one> ` alone") == "&lt;one&gt; ` alone"
