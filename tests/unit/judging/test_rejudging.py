"""Which turns an operator may have judged again, and what the others say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from clawloop.core.contracts.sessions import SessionFacts
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.core.judging.plan import RejudgeFacts, why_not_rejudged

SESSION = SessionFacts(SessionId(UUID(int=1)), "default", "session_id", datetime.now(UTC), 0)
GOOD = RejudgeFacts(new_turn_id(), SESSION, TurnKind.MAIN, TurnOutcome.UNJUDGED, True, None, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outcome": TurnOutcome.WAITING},
        {"outcome": TurnOutcome.UNDECIDED},
        {"outcome": TurnOutcome.NOT_TRAINABLE},
        {"outcome": TurnOutcome.SAMPLED, "sample": SampleState.FRESH},
        {"outcome": TurnOutcome.UNDECIDED, "sample": SampleState.SUPERSEDED},
        {"outcome": TurnOutcome.EXPIRED, "sample": SampleState.EXPIRED},
    ],
)
def test_a_turn_whose_sample_no_step_has_used_may_be_judged_again(changes: dict[str, Any]) -> None:
    assert why_not_rejudged(replace(GOOD, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": TurnKind.SIDE, "outcome": TurnOutcome.SIDE}, "side turn"),
        ({"outcome": TurnOutcome.ERASED}, "it was erased"),
        ({"outcome": TurnOutcome.NO_FEEDBACK}, "nothing to judge it by"),
        ({"outcome": TurnOutcome.NOT_TRAINABLE, "replied": False}, "no reply"),
        ({"outcome": TurnOutcome.WAITING, "has_follow_up": False}, "no message has followed it yet"),
        ({"outcome": TurnOutcome.SAMPLED, "sample": SampleState.CLAIMED}, "a training step is using its sample now"),
        (
            {"outcome": TurnOutcome.TRAINED, "sample": SampleState.TRAINED},
            "its sample is trained already: give feedback",
        ),
        ({"outcome": TurnOutcome.QUARANTINED, "sample": SampleState.QUARANTINED}, "its sample is quarantined already"),
    ],
)
def test_a_turn_that_may_not_be_judged_again_has_a_reason(changes: dict[str, Any], why: str) -> None:
    assert why in str(why_not_rejudged(replace(GOOD, **changes)))
