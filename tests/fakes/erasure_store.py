"""Erasing in memory, over the turns of a fake turn store, without samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

from clawloop.core.contracts.sessions import ContentErased, Erasure
from clawloop.core.contracts.turns import Message, StoredTurn, TurnKind, TurnOutcome
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.turns.copies import find_copies
from tests.fakes.turn_facts import above, facts
from tests.fakes.turn_store import FakeTurnStore


class FakeErasureStore:
    """Satisfies `clawloop.operations.sessions.ErasureStore`."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns

    async def copies_of(self, session: SessionId) -> list[SessionId]:
        turns = [turn for turn in await self._turns.all() if turn.outcome is not TurnOutcome.ERASED]
        keys = {turn.record.api_key_id for turn in turns if turn.session_id == session}
        turns = [turn for turn in turns if turn.record.api_key_id in keys]
        mixed = {turn.session_id for turn in turns if turn.record.kind is TurnKind.MAIN}
        own: list[Message] = []
        beside: defaultdict[SessionId, list[Message]] = defaultdict(list)
        for turn in turns:
            if turn.session_id == session or turn.session_id not in mixed:
                said = own if turn.session_id == session else beside[turn.session_id]
                said += [*turn.record.messages, *([turn.record.response] if turn.record.response else [])]
        return find_copies(own, beside)

    async def artifacts_of(self, session: SessionId) -> list[str]:
        return []  # its turns are of no episode

    async def erase_session(self, session: SessionId) -> Erasure | None:
        own = [turn for turn in await self._turns.all() if turn.session_id == session]
        if not own:
            return None
        self._turns.erased[session] = datetime.now(UTC)
        return await self._erase(own, own, whole=True)

    async def erase_turn(self, turn: TurnId) -> Erasure | None:
        stored = await self._turns.load(turn)
        if stored is None:
            return None
        own = [other for other in await self._turns.all() if other.session_id == stored.session_id]
        begins = {other.record.turn_id for other in own if _begins_with(stored, other)}
        meant = [
            other for other in own if begins & {other.record.turn_id, *(up.record.turn_id for up in above(own, other))}
        ]
        return await self._erase(own, meant, whole=False)

    async def _erase(self, own: Sequence[StoredTurn], meant: Sequence[StoredTurn], *, whole: bool) -> Erasure:
        alive = [turn for turn in meant if turn.outcome is not TurnOutcome.ERASED]
        self._turns.erase([turn.record.turn_id for turn in alive])
        erased = {turn.record.turn_id for turn in meant}
        newest = [
            turn.record.turn_id
            for turn in own
            if turn.record.kind is TurnKind.MAIN
            if turn.outcome is TurnOutcome.ERASED or turn.record.turn_id in erased
        ]
        learned = sum(turn.outcome is TurnOutcome.TRAINED for turn in alive)
        return Erasure(facts(own[0]), len(alive), 0, learned, ContentErased(tuple(reversed(newest)), whole))


def _begins_with(one: StoredTurn, other: StoredTurn) -> bool:
    if one.record.turn_id == other.record.turn_id:
        return True
    alive = TurnOutcome.ERASED not in (one.outcome, other.outcome)
    messages = one.record.messages
    return alive and one.parent_turn_id == other.parent_turn_id and messages == other.record.messages[: len(messages)]
