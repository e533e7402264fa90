"""Valid turn records for tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from clawloop.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnRecord, TurnStatus
from clawloop.ids import ApiKeyId, new_turn_id

KEY = ApiKeyId(UUID(int=1))


def turn_record(text: str = "hi", **changes: Any) -> TurnRecord:
    """A complete main turn with the user message `text`; `changes` replace fields."""
    record = TurnRecord(
        turn_id=new_turn_id(),
        group_id=None,
        choice=0,
        api_key_id=KEY,
        policy="default",
        alias="policy",
        evidence=SessionEvidence(SessionSource.CONVERSATION, None),
        kind=TurnKind.MAIN,
        kind_reason="default",
        status=TurnStatus.COMPLETE,
        error=None,
        version=0,
        engine_id="e0",
        messages=[{"role": "user", "content": text}],
        tools=None,
        response={"role": "assistant", "content": "hello"},
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5],
        logprobs=[-0.5, -0.25],
        sampling={"temperature": 0.6, "top_p": 1.0, "top_k": -1},
        finish_reason="stop",
        ends_session=False,
        started_at=datetime.now(UTC),
        finished_at=datetime.now(UTC),
    )
    return replace(record, **changes)
