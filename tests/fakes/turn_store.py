"""Turns in memory, with the same rules for sessions and parents as in PostgreSQL; passes the same contract tests."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast

from clawloop.core.contracts.turns import (
    InsertedTurn,
    MatchedBy,
    Message,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnKind,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.core.errors import StoreUnavailable
from clawloop.core.ids import ApiKeyId, LessonId, SessionId, TurnId
from clawloop.core.samples.decision import LESSON_ERASED, PREFIX
from clawloop.core.turns.conversation import KnownPrefix, choose_session, choose_session_by_place
from clawloop.core.turns.files import take_files
from clawloop.core.turns.identify import conversation_session_id, named_session_id
from clawloop.core.turns.parents import Candidate, find_parent
from clawloop.core.turns.places import AskedTurn, Placed, find_places
from db.turns.prepared_turn import PreparedTurn, Request


class FakeTurnStore:
    """
    Attributes:
        available: False makes every call raise StoreUnavailable.
        records: the inserted records, in order of insertion; tests may clear the list.
        announced: when each turn's workflow was notified.
        matched: how each turn's parent was found.
        fates: outcomes of turns that changed after insertion.
        erased: when sessions and turns were erased.
        erased_lessons: lessons whose text is gone.
    """

    def __init__(self) -> None:
        self.available = True
        self.records: list[TurnRecord] = []
        self._prepared: dict[TurnId, PreparedTurn] = {}
        self._inserted: dict[TurnId, InsertedTurn] = {}
        self.announced: dict[TurnId, datetime] = {}
        self.marked_ago: list[timedelta] = []
        self.fates: dict[TurnId, tuple[TurnOutcome, str | None]] = {}
        self.erased: dict[SessionId | TurnId, datetime] = {}
        self.erased_lessons: set[LessonId] = set()
        self._prefixes: dict[TurnId, tuple[bytes, bytes | None]] = {}  # they outlive an erasure
        self._asked: dict[TurnId, bytes] = {}  # digests of what turns were asked, as matched
        self.matched: dict[TurnId, MatchedBy] = {}
        self._expecting: dict[tuple[ApiKeyId, bytes], SessionId] = {}

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        self._require_available()
        record = copy.deepcopy(record)
        prepared = PreparedTurn.checked(record)
        record = prepared.record
        if any(lesson.id in self.erased_lessons for lesson in record.lessons):
            prepared = self._without_erased_lessons(prepared)
            record = prepared.record
        if (inserted := self._inserted.get(record.turn_id)) is not None:
            return InsertedTurn(inserted.turn_id, inserted.session_id, inserted.parent_turn_id, duplicate=True)
        session, unknown_before = self._session(prepared)
        match = self._match(session, prepared.request)
        parent = None if match is None else match[0]
        self._asked[record.turn_id] = self.placed(session, prepared.request).whole
        if match is not None:
            self.matched[record.turn_id] = match[1]
        if unknown_before and parent is None and record.evidence.source is SessionSource.CONVERSATION:
            for digest in prepared.request.history.replies:
                self._expecting.setdefault((record.api_key_id, digest), session)
        if self._was_erased(prepared, session):
            prepared, parent = PreparedTurn(bare(record)), None
            record = prepared.record
            self.fates[record.turn_id] = (TurnOutcome.ERASED, "erased")
            self.announced[record.turn_id] = datetime.now(UTC)
        else:
            self._prefixes[record.turn_id] = (prepared.request.history.whole, prepared.reply_digest)
        self.records.append(record)
        self._prepared[record.turn_id] = prepared
        gone = record.turn_id in self.fates
        opens = not gone and all(known.session_id != session for known in self._inserted.values())
        self._inserted[record.turn_id] = InsertedTurn(record.turn_id, session, parent, False, gone, opens)
        self._reparent_late_turns(record.turn_id, session)
        return self._inserted[record.turn_id]

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        results = await asyncio.gather(*(self.insert(record) for record in records), return_exceptions=True)
        return [cast("InsertedTurn | Exception", result) for result in results]

    def erase(self, turns: Collection[TurnId]) -> None:
        """Erase the content of these turns."""
        for turn_id in turns:
            prepared = PreparedTurn(bare(self._prepared[turn_id].record))
            self._prepared[turn_id] = prepared
            self.fates[turn_id] = (TurnOutcome.ERASED, "erased")
            self.erased[turn_id] = datetime.now(UTC)
            self.announced.setdefault(turn_id, datetime.now(UTC))
        self.records = [self._prepared[record.turn_id].record for record in self.records]

    def erase_lesson(self, lesson: LessonId) -> int:
        """Erase a lesson from the prompts of all turns; returns their number."""
        self.erased_lessons.add(lesson)
        held = [
            prepared
            for prepared in self._prepared.values()
            if any(shown.id == lesson for shown in prepared.record.lessons)
        ]
        for prepared in held:
            turn_id = prepared.record.turn_id
            self._prepared[turn_id] = self._without_erased_lessons(prepared)
            outcome, _ = self.fates.get(turn_id, prepared.outcome)
            if outcome not in (TurnOutcome.WAITING, TurnOutcome.SIDE):
                self.fates[turn_id] = (TurnOutcome.NOT_TRAINABLE, f"{PREFIX}{LESSON_ERASED}")
        self.records = [self._prepared[record.turn_id].record for record in self.records]
        return len(held)

    def turns_with(self, lesson: LessonId) -> int:
        return sum(any(shown.id == lesson for shown in record.lessons) for record in self.records)

    def _without_erased_lessons(self, prepared: PreparedTurn) -> PreparedTurn:
        left = tuple(
            replace(shown, text="") if shown.id in self.erased_lessons else shown for shown in prepared.record.lessons
        )
        return PreparedTurn(replace(prepared.record, prompt_ids=None, lessons=left))

    def _was_erased(self, prepared: PreparedTurn, session: SessionId) -> bool:
        """Whether a turn holds content erased since it began."""
        history, began = prepared.request.history, prepared.record.started_at
        holds: set[SessionId | TurnId] = {session}
        for turn_id, (request_hash, reply_hash) in self._prefixes.items():
            if self._inserted[turn_id].session_id == session and (
                request_hash == history.whole or reply_hash in history.replies
            ):
                holds.add(turn_id)
        return any(began <= self.erased[key] for key in holds & self.erased.keys())

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        self._require_available()
        request = Request(key, evidence, take_files(messages)[0])
        session = self._known_session(request)
        match = None if session is None else self._match(session, request)
        return None if match is None else self._prepared[match[0]].record.version

    async def lessons_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> tuple[LessonId, ...] | None:
        self._require_available()
        request = Request(key, evidence, take_files(messages)[0])
        session = self._known_session(request)
        match = None if session is None else self._match(session, request)
        if match is None or match[1] is MatchedBy.REPLY:
            return None
        turn_id = match[0]
        while (record := self._prepared[turn_id].record).kind is TurnKind.SIDE:
            before = self._inserted[turn_id].parent_turn_id
            if before is None or self.matched.get(turn_id) is MatchedBy.REPLY:
                return None
            turn_id = before
        return tuple(lesson.id for lesson in record.lessons)

    async def load(self, turn_id: TurnId) -> StoredTurn | None:
        self._require_available()
        if (prepared := self._prepared.get(turn_id)) is None:
            return None
        inserted = self._inserted[turn_id]
        outcome, detail = self.fates.get(turn_id, prepared.outcome)
        matched = None if inserted.parent_turn_id is None else self.matched.get(turn_id)
        return StoredTurn(
            prepared.record,
            inserted.session_id,
            inserted.parent_turn_id,
            outcome,
            detail,
            self.announced.get(turn_id),
            matched,
        )

    async def read(self, sha256: str) -> bytes | None:
        """Satisfies `api.stores.FileReader`."""
        return self._files(self._prepared).get(sha256)

    async def of_session(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        turns = [turn_id for turn_id, inserted in self._inserted.items() if inserted.session_id == session]
        return {sha256: content for sha256, content in self._files(turns).items() if sha256 in sha256s}

    def _files(self, turns: Iterable[TurnId]) -> dict[str, bytes]:
        self._require_available()
        return {
            file.sha256: file.content
            for turn_id in turns
            for of_message in self._prepared[turn_id].files
            for file in of_message
        }

    async def all(self) -> list[StoredTurn]:
        """In their order."""
        ids = sorted(record.turn_id for record in self.records)
        return [stored for turn_id in ids if (stored := await self.load(turn_id)) is not None]

    async def parent_of(self, turn_id: TurnId) -> TurnId | None:
        self._require_available()
        return self._inserted[turn_id].parent_turn_id if turn_id in self._inserted else None

    async def mark_notified(self, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        self._require_available()
        self.marked_ago.append(ago)
        for turn_id in turn_ids:
            self.announced.setdefault(turn_id, datetime.now(UTC))

    def _require_available(self) -> None:
        if not self.available:
            raise StoreUnavailable("the fake store is unavailable")

    def _session(self, prepared: PreparedTurn) -> tuple[SessionId, bool]:
        if (known := self._known_session(prepared.request)) is not None:
            return known, False
        if prepared.reply_digest is not None:
            expecting = self._expecting.get((prepared.record.api_key_id, prepared.reply_digest))
            if expecting is not None:
                return expecting, True
        return conversation_session_id(prepared.first_choice), True

    def _known_session(self, request: Request) -> SessionId | None:
        if request.evidence.source is not SessionSource.CONVERSATION:
            return named_session_id(request.key, request.evidence)
        known: list[KnownPrefix] = []
        for turn_id, prepared in self._before(request.before):
            if prepared.record.api_key_id != request.key or turn_id not in self._prefixes:
                continue
            session = self._inserted[turn_id].session_id
            completed = prepared.record.status in (TurnStatus.COMPLETE, TurnStatus.LENGTH)
            request_hash, reply_hash = self._prefixes[turn_id]
            known.append(KnownPrefix(request_hash, turn_id, session, False, completed))
            if reply_hash is not None:
                known.append(KnownPrefix(reply_hash, turn_id, session, True, completed))
        if (chosen := choose_session(request.history, known)) is not None:
            return chosen
        asked: dict[bytes, list[tuple[SessionId, Message, bool]]] = {}
        for turn_id, prepared in self._before(request.before):
            if prepared.record.api_key_id == request.key and prepared.record.response and turn_id in self._prefixes:
                ended = prepared.record.status in (TurnStatus.COMPLETE, TurnStatus.LENGTH)
                said = (self._inserted[turn_id].session_id, prepared.record.response, ended)
                asked.setdefault(self._prefixes[turn_id][0], []).append(said)
        return choose_session_by_place(request.history, asked)

    def _match(self, session: SessionId, request: Request) -> tuple[TurnId, MatchedBy] | None:
        return find_parent(request.history, self.candidates(session, request), self.placed(session, request).replies)

    def placed(self, session: SessionId, request: Request) -> Placed:
        """The replies of this session that stand in the request in other words."""
        turns = [
            AskedTurn(
                turn_id,
                prepared.record.kind,
                self._asked[turn_id],
                prepared.record.response,
                ended=prepared.record.status in (TurnStatus.COMPLETE, TurnStatus.LENGTH),
            )
            for turn_id, prepared in self._before(request.before)
            if self._inserted[turn_id].session_id == session and prepared.record.response and not prepared.goes_on
        ]
        return find_places(request.history, turns)

    def candidates(self, session: SessionId, request: Request) -> list[Candidate]:
        """The turns of this session, older than the request, that replied."""
        return [
            Candidate(turn_id, prepared.record.kind, prepared.response_digest, prepared.reply_digest)
            for turn_id, prepared in self._before(request.before)
            if self._inserted[turn_id].session_id == session
            if prepared.response_digest is not None and prepared.reply_digest is not None
        ]

    def _before(self, bound: TurnId | None) -> list[tuple[TurnId, PreparedTurn]]:
        return [(turn_id, prepared) for turn_id, prepared in self._prepared.items() if bound is None or turn_id < bound]

    def _reparent_late_turns(self, late: TurnId, session: SessionId) -> None:
        for turn_id, inserted in list(self._inserted.items()):
            parent = inserted.parent_turn_id
            if self.fates.get(turn_id, (None, None))[0] is TurnOutcome.ERASED:
                continue
            if inserted.session_id != session or turn_id <= late or (parent is not None and parent >= late):
                continue
            match = self._match(session, self._prepared[turn_id].request)
            if match is not None and match[0] == late:
                self.matched[turn_id] = match[1]
                self._inserted[turn_id] = replace(inserted, parent_turn_id=late)


def bare(record: TurnRecord) -> TurnRecord:
    """A turn without its content."""
    return replace(
        record,
        evidence=SessionEvidence(record.evidence.source, None, policy=record.evidence.policy),
        kind_reason="erased",
        error=None,
        messages=[],
        tools=None,
        response=None,
        prompt_ids=None,
        response_ids=None,
        logprobs=None,
        sampling={},
        lessons=(),
    )
