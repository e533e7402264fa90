"""What the Temporal UI shows of training."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from activities.training.train_step import StepDone
from clawloop.core.contracts.training import Claim, StepState, TrainingState, TrainingView
from workflows.descriptions import training_headline, training_table

SINCE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VIEW = TrainingView(
    policy="default",
    pool="default",
    state=TrainingState.WAITING,
    reason="",
    ready=5,
    needed=16,
    judging=3,
    oldest_seconds=None,
    step=7,
    step_state=None,
    head=6,
    version=6,
    epoch=0,
    pinned=None,
    unpublished=False,
    max_wait_seconds=None,
    closed_seconds=None,
    probed=False,
    canary=None,
    canary_parent=None,
    progress=None,
)
BATCH = Claim(policy="default", n=7, state=StepState.CLAIMED, samples=16)


@pytest.mark.parametrize(
    ("view", "computing", "publishing", "headline"),
    [
        (None, None, True, "reading the ledger"),
        (
            VIEW,
            None,
            False,
            "waiting: 5 of 16 samples, 3 turns are being judged\n\nv6 answers, the newest",
        ),
        (
            VIEW,
            BATCH,
            True,
            "step 7: 16 samples, from v6, queued for trainer-default at 2026-01-02 03:04 UTC\n\n"
            "v6 answers, engines are loading the newest",
        ),
        (
            replace(VIEW, state=TrainingState.PAUSED, reason="paused: for now", version=5),
            None,
            False,
            "paused: for now\n\nv5 answers, v6 is trained",
        ),
        (
            replace(VIEW, step_state=StepState.CLAIMED, pinned=6),
            None,
            False,
            "step 7: its batch is claimed\n\nv6 answers, pinned",
        ),
        (
            replace(VIEW, step_state=StepState.CANDIDATE),
            None,
            False,
            "step 7: its version is at the gate\n\nv6 answers, the newest",
        ),
    ],
)
def test_the_headline_shows_what_training_does_and_which_version_answers(
    view: TrainingView | None, computing: Claim | None, publishing: bool, headline: str
) -> None:
    assert training_headline(view, computing, SINCE, publishing, []) == headline
    assert (
        training_headline(view, computing, SINCE, publishing, ["PostgreSQL call failed: x"])
        == f"{headline}\n\nPostgreSQL call failed: x"
    )


def test_a_bar_in_a_reason_does_not_break_the_table_and_unknown_figures_are_empty() -> None:
    bad = StepDone(policy="default", n=6, state=StepState.QUARANTINED, reason="KL | over\nbound")
    good = StepDone(policy="default", n=7, state=StepState.COMMITTED, samples=16, loss=0.123456, kl=0.0, seconds=2.04)
    good = good.model_copy(update={"gate": "numbers passed"})
    assert training_table([], None) == "No step is done yet."
    assert training_table([bad, good], 7).splitlines()[2:] == [
        "| 6 |  |  |  |  |  |  | quarantined: KL / over bound |  |",
        "| 7 | 16 | 0.1235 | 0 |  | 2.0 | numbers passed | committed | yes |",
    ]
    assert "yes" not in training_table([bad], 6)
