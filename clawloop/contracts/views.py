"""Sessions and turns as the API and the command line show them. Unknown values are None."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome, TurnStatus
from clawloop.ids import SessionId, TurnId


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session in a list.

    Args:
        external_id: the client's own value; None if the client named none.
        waiting, sampled: number of its turns that wait, and that have a sample.
        closed_why: None if it was never closed.
        guarantee: what the at-least-one rule did at its first close.
    """

    id: SessionId
    policy: str
    external_id: str | None
    identified_by: str
    state: SessionState
    main_turns: int
    side_turns: int
    waiting: int
    sampled: int
    created_at: datetime
    last_turn_at: datetime
    closed_at: datetime | None
    closed_why: str | None
    guarantee: str | None


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn with its outcome.

    Args:
        number: its position among the session's main turns, from 1; None for a side turn.
        why: reason of its outcome; None without one.
        votes: number of valid votes.
        step: the step that trained it; None if none did.
    """

    id: TurnId
    session_id: SessionId
    parent_turn_id: TurnId | None
    number: int | None
    kind: TurnKind
    kind_reason: str
    status: TurnStatus
    error: str | None
    version: int
    outcome: TurnOutcome
    why: str | None
    verdict: int | None
    expected: float | None
    votes: int
    hint: str | None
    sample: SampleState | None
    reward: float | None
    step: int | None
    started_at: datetime
    announced_at: datetime | None
