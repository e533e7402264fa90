"""The state that a session's workflow continues with stays far below Temporal's limit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import uuid4

from temporalio.contrib.pydantic import pydantic_data_converter

from activities.judging.messages import WHY_LIMIT
from clawloop.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import SessionId, new_feedback_id, new_turn_id
from clawloop.temporal.plugin import PAYLOAD_WARN_BYTES
from workflows.state import INBOX_LIMIT, KNOWN_LIMIT, ROWS_LIMIT, SessionState


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
    assert len(full().model_dump_json(by_alias=True).encode()) < PAYLOAD_WARN_BYTES


def test_closes_again_keeps_the_key_that_saved_histories_hold() -> None:
    stored = full().model_dump(mode="json", by_alias=True) | {"looked_into": True}
    state = SessionState.model_validate(stored)
    assert state.closes_again
    payload = pydantic_data_converter.payload_converter.to_payload(state)
    assert json.loads(payload.data) == stored


def test_carried_messages_keep_their_types() -> None:
    state = full()
    assert SessionState.model_validate_json(state.model_dump_json(by_alias=True)) == state
