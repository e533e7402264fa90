"""The state that a session's workflow continues with stays far below Temporal's limit."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from activities.judging.judge_turn import WHY_LIMIT
from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES
from clawloop.core.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import SessionId, new_feedback_id, new_turn_id
from workflows.state import INBOX_LIMIT, KNOWN_LIMIT, ROWS_LIMIT, SessionState, kept_for_next_run


def full() -> SessionState:
    row = TurnResult(
        turn_id=new_turn_id(),
        number=123_456,
        kind="main",
        outcome=TurnOutcome.NOT_TRAINABLE,
        verdict=-1,
        sample=False,
        step=123_456,
        why="−" * WHY_LIMIT,
    )
    message = FeedbackGiven(new_feedback_id(), new_turn_id())
    return SessionState(
        session_id=SessionId(uuid4()),
        policy="p" * 200,
        idle_seconds=1800.0,
        adapter_version=123_456,
        known=[new_turn_id() for _ in range(KNOWN_LIMIT)],
        carried=[
            TurnRecorded(new_turn_id(), 7, True),
            RejudgeRequested(new_turn_id(), 2),
            *[message] * (INBOX_LIMIT - 2),
        ],
        rows=[row] * ROWS_LIMIT,
        deadline=datetime.now(UTC),
    )


def test_a_full_state_is_a_small_payload() -> None:
    assert len(full().model_dump_json().encode()) < PAYLOAD_WARN_BYTES


def test_carried_messages_keep_their_types() -> None:
    state = full()
    assert SessionState.model_validate_json(state.model_dump_json()) == state


def turns(count: int) -> list[TurnRecorded]:
    return [TurnRecorded(new_turn_id(), 0, False, False) for _ in range(count)]


def pieces_of_feedback(count: int) -> list[FeedbackGiven]:
    return [FeedbackGiven(new_feedback_id(), new_turn_id()) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, INBOX_LIMIT])
def test_the_next_run_takes_over_all_messages_up_to_a_limit(count: int) -> None:
    messages = turns(count)
    assert kept_for_next_run(messages) == messages


def test_of_too_many_messages_the_oldest_turns_are_left_to_the_closing() -> None:
    """It reads them in PostgreSQL; it knows nothing of feedback and of an operator's requests."""
    old, feedback, new = turns(30), pieces_of_feedback(3), turns(INBOX_LIMIT - 10)
    request = RejudgeRequested(new_turn_id(), 1)
    kept = kept_for_next_run([*old[:10], *feedback, *old[10:], request, *new])
    assert kept == [*feedback, *old[-6:], request, *new]
    assert len(kept) == INBOX_LIMIT


def test_of_too_much_feedback_the_newest_is_taken_over() -> None:
    feedback = pieces_of_feedback(INBOX_LIMIT + 5)
    assert kept_for_next_run([*turns(5), *feedback]) == feedback[5:]
