"""Turns in memory, placed by the same pure rules as those in PostgreSQL; satisfies the same contract suite."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from clawloop.contracts.turns import (
    InsertedTurn,
    Message,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.errors import StoreUnavailable
from clawloop.ids import ApiKeyId, SessionId, TurnId
from clawloop.turns.conversation import KnownPrefix, choose_session
from clawloop.turns.identify import conversation_session_id, named_session_id
from clawloop.turns.parents import Candidate, find_parent
from db.turns.prepared_turn import PreparedTurn, Request


class FakeTurnStore:
    """
    Attributes:
        available: False makes every call raise StoreUnavailable.
        records: what was entered, in order of arrival; tests may clear it.
        announced: when each turn's workflow was told.
        fates: what became of turns since they were entered.
        erased: when sessions and turns were.
    """

    def __init__(self) -> None:
        self.available = True
        self.records: list[TurnRecord] = []
        self._entries: dict[TurnId, PreparedTurn] = {}
        self._places: dict[TurnId, InsertedTurn] = {}
        self.announced: dict[TurnId, datetime] = {}
        self.fates: dict[TurnId, tuple[TurnOutcome, str | None]] = {}
        self.erased: dict[SessionId | TurnId, datetime] = {}
        self._prefixes: dict[TurnId, tuple[bytes, bytes | None]] = {}  # they outlive an erasure
        self._expecting: dict[tuple[ApiKeyId, bytes], SessionId] = {}

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        self._require_available()
        record = copy.deepcopy(record)
        entry = PreparedTurn(record)
        assert entry.conversation.messages is not None  # raises what can never be stored
        if (place := self._places.get(record.turn_id)) is not None:
            return InsertedTurn(place.turn_id, place.session_id, place.parent_turn_id, duplicate=True)
        session, unknown_before = self._session(entry)
        parent = self._parent(session, entry.request)
        if unknown_before and parent is None and record.evidence.source is SessionSource.CONVERSATION:
            for digest in entry.request.lookup.replies:
                self._expecting.setdefault((record.api_key_id, digest), session)
        if self._was_erased(entry, session):
            entry, parent = PreparedTurn(bare(record)), None
            record = entry.record
            self.fates[record.turn_id] = (TurnOutcome.ERASED, "erased")
            self.announced[record.turn_id] = datetime.now(UTC)
        else:
            self._prefixes[record.turn_id] = (entry.request.lookup.whole, entry.reply_digest)
        self.records.append(record)
        self._entries[record.turn_id] = entry
        gone = record.turn_id in self.fates
        self._places[record.turn_id] = InsertedTurn(record.turn_id, session, parent, duplicate=False, erased=gone)
        self._adopt_later_turns(record.turn_id, session)
        return self._places[record.turn_id]

    def erase(self, turns: Collection[TurnId]) -> None:
        """Take the content of these turns."""
        for turn_id in turns:
            entry = PreparedTurn(bare(self._entries[turn_id].record))
            self._entries[turn_id] = entry
            self.fates[turn_id] = (TurnOutcome.ERASED, "erased")
            self.erased[turn_id] = datetime.now(UTC)
            self.announced.setdefault(turn_id, datetime.now(UTC))
        self.records = [self._entries[record.turn_id].record for record in self.records]

    def _was_erased(self, entry: PreparedTurn, session: SessionId) -> bool:
        """Whether a turn on its way holds what was erased since."""
        found, began = entry.request.lookup, entry.record.started_at
        holds: set[SessionId | TurnId] = {session}
        for turn_id, (asked, replied) in self._prefixes.items():
            if self._places[turn_id].session_id == session and (asked == found.whole or replied in found.replies):
                holds.add(turn_id)
        return any(began <= self.erased[one] for one in holds & self.erased.keys())

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        self._require_available()
        request = Request(key, evidence, messages)
        session = self._known_session(request)
        parent = None if session is None else self._parent(session, request)
        return None if parent is None else self._entries[parent].record.version

    async def load(self, turn_id: TurnId) -> StoredTurn | None:
        self._require_available()
        if (entry := self._entries.get(turn_id)) is None:
            return None
        place = self._places[turn_id]
        outcome, detail = self.fates.get(turn_id, entry.outcome)
        return StoredTurn(
            entry.record, place.session_id, place.parent_turn_id, outcome, detail, self.announced.get(turn_id)
        )

    async def all(self) -> list[StoredTurn]:
        """In their order."""
        ids = sorted(record.turn_id for record in self.records)
        return [stored for turn_id in ids if (stored := await self.load(turn_id)) is not None]

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        self._require_available()
        for turn_id in turn_ids:
            self.announced.setdefault(turn_id, datetime.now(UTC))

    def _require_available(self) -> None:
        if not self.available:
            raise StoreUnavailable("the fake was told to be away")

    def _session(self, entry: PreparedTurn) -> tuple[SessionId, bool]:
        if (known := self._known_session(entry.request)) is not None:
            return known, False
        if entry.reply_digest is not None:
            expecting = self._expecting.get((entry.record.api_key_id, entry.reply_digest))
            if expecting is not None:
                return expecting, True
        return conversation_session_id(entry.first_choice), True

    def _known_session(self, request: Request) -> SessionId | None:
        if request.evidence.source is not SessionSource.CONVERSATION:
            return named_session_id(request.key, request.evidence)
        known: list[KnownPrefix] = []
        for turn_id, entry in self._before(request.before):
            if entry.record.api_key_id != request.key or turn_id not in self._prefixes:
                continue
            session = self._places[turn_id].session_id
            completed = entry.record.status in (TurnStatus.COMPLETE, TurnStatus.LENGTH)
            asked, replied = self._prefixes[turn_id]
            known.append(KnownPrefix(asked, turn_id, session, False, completed))
            if replied is not None:
                known.append(KnownPrefix(replied, turn_id, session, True, completed))
        return choose_session(request.lookup, known)

    def _parent(self, session: SessionId, request: Request) -> TurnId | None:
        return find_parent(request.seed, request.messages, self.candidates(session, request))

    def candidates(self, session: SessionId, request: Request) -> list[Candidate]:
        """The turns of this session, older than the request, that replied."""
        return [
            Candidate(turn_id, entry.record.kind, entry.response_digest, entry.reply_digest)
            for turn_id, entry in self._before(request.before)
            if self._places[turn_id].session_id == session
            if entry.response_digest is not None and entry.reply_digest is not None
        ]

    def _before(self, bound: TurnId | None) -> list[tuple[TurnId, PreparedTurn]]:
        return [(turn_id, entry) for turn_id, entry in self._entries.items() if bound is None or turn_id < bound]

    def _adopt_later_turns(self, late: TurnId, session: SessionId) -> None:
        for turn_id, place in list(self._places.items()):
            parent = place.parent_turn_id
            if self.fates.get(turn_id, (None, None))[0] is TurnOutcome.ERASED:
                continue
            if place.session_id != session or turn_id <= late or (parent is not None and parent >= late):
                continue
            if self._parent(session, self._entries[turn_id].request) == late:
                self._places[turn_id] = InsertedTurn(turn_id, session, late, duplicate=False)


def bare(record: TurnRecord) -> TurnRecord:
    """A turn without its content."""
    return replace(
        record,
        evidence=SessionEvidence(record.evidence.source, None),
        kind_reason="erased",
        error=None,
        messages=[],
        tools=None,
        response=None,
        prompt_ids=None,
        response_ids=None,
        logprobs=None,
        sampling={},
    )
