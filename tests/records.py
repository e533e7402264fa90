"""Valid records for tests: a turn as it is recorded, and what people are shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from clawloop.core.contracts.episodes import Ending, EpisodeState, EpisodeView
from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord, TurnStatus
from clawloop.core.contracts.views import SessionView, TurnView
from clawloop.core.ids import ApiKeyId, EpisodeId, RolloutGroupId, SessionId, new_turn_id

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


def turn_view(**changes: Any) -> TurnView:
    """A main turn that waits; `changes` replace fields."""
    view = TurnView(
        id=new_turn_id(),
        short_id="00000000",
        session_id=SessionId(UUID(int=2)),
        parent_turn_id=None,
        number=1,
        kind=TurnKind.MAIN,
        kind_reason="default",
        status=TurnStatus.COMPLETE,
        error=None,
        version=0,
        outcome=TurnOutcome.WAITING,
        why="waits for its judge",
        verdict=None,
        expected=None,
        votes=0,
        hints=(),
        sample=None,
        reward=None,
        step=None,
        tokens=2,
        being_judged=False,
        episode_id=None,
        started_at=datetime.now(UTC),
        announced_at=None,
    )
    return view.model_copy(update=changes)


def session_view(**changes: Any) -> SessionView:
    """An open session of one turn; `changes` replace fields."""
    view = SessionView(
        id=SessionId(UUID(int=2)),
        short_id="00000000",
        policy="default",
        title="hi",
        erased=False,
        external_id=None,
        identified_by=SessionSource.CONVERSATION,
        state=SessionState.OPEN,
        main_turns=1,
        side_turns=0,
        waiting=1,
        sampled=0,
        created_at=datetime.now(UTC),
        last_turn_at=datetime.now(UTC),
        closed_at=None,
        closed_why=None,
        guarantee=None,
        praised=0,
        blamed=0,
        first_version=0,
        last_version=0,
        task_outcome=None,
        key_id=KEY,
        episode_id=None,
    )
    return view.model_copy(update=changes)


def episode_view(**changes: Any) -> EpisodeView:
    """An episode that succeeded; `changes` replace fields."""
    view = EpisodeView(
        id=EpisodeId(UUID(int=3)),
        group=RolloutGroupId(UUID(int=4)),
        policy="default",
        environment="tool-call",
        task="task-1",
        place=0,
        attempt=1,
        state=EpisodeState.SCORED,
        ending=Ending.COMPLETED,
        reward=1.0,
        advantage=None,
        reason=None,
        artifact_sha256=None,
        turns=1,
        tokens=2,
        trained=0,
        started_at=datetime.now(UTC),
        ended_at=datetime.now(UTC),
    )
    return replace(view, **changes)
