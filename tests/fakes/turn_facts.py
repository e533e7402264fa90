"""Facts about stored turns that several fakes need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from clawloop.core.contracts.sessions import SessionFacts
from clawloop.core.contracts.turns import StoredTurn, TurnKind
from clawloop.core.ids import TurnId


def above(own: Sequence[StoredTurn], turn: StoredTurn) -> Iterator[StoredTurn]:
    by_id = {one.record.turn_id: one for one in own}
    parent = turn.parent_turn_id
    while parent is not None and parent in by_id:
        yield by_id[parent]
        parent = by_id[parent].parent_turn_id


def follows(own: Sequence[StoredTurn], turn: StoredTurn) -> TurnId | None:
    """The nearest main turn above it."""
    return next((up.record.turn_id for up in above(own, turn) if up.record.kind is TurnKind.MAIN), None)


def is_older(turn: StoredTurn, age: timedelta) -> bool:
    return datetime.now(UTC) - turn.record.started_at >= age


def facts(turn: StoredTurn) -> SessionFacts:
    record = turn.record
    return SessionFacts(turn.session_id, record.policy, record.evidence.source, record.started_at, record.version)
