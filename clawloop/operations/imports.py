"""Imports logs of OpenClaw-RL, and exports of Clawloop, line by line. Importing a file again adds nothing."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from clawloop.contracts.answers import ImportDone, UnusableLine
from clawloop.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind, TurnRecord, TurnStatus
from clawloop.errors import RecordUnusable
from clawloop.ids import ApiKeyId, TurnId, following_turn_id
from clawloop.judging.voting import majority, signed
from clawloop.samples.eligibility import unseen_parts, why_not_trainable
from clawloop.turns.logged import LoggedJudgement, LoggedTurn, read_line

ALIAS = "imported"
NO_REPLY = "no reply: the log has none"
# Sessions whose next line may come at any time; a turn of each, with its conversation, is in memory meanwhile. What is
# added for one that was put out is replaced if its next line comes after all.
OPEN_SESSIONS = 1000
# More than a person reads; a log of another form has a problem in each line.
NAMED_PROBLEMS = 100


class ImportStore(Protocol):
    """Stores what is imported. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def import_key(self, policy: str) -> ApiKeyId:
        """The key that a policy's imported turns belong to, made when it is missing; nobody can use it.

        Raises:
            NotFound: there is no such policy, or it was retired.
        """

    async def add_turn(self, record: TurnRecord, why: str) -> bool:
        """Insert a turn that is never trained, and close its session; False if it is stored already.

        What was known of the turn by the next state of the one before is deleted.

        Args:
            why: reason of its outcome.

        Raises:
            RecordUnusable: it can never be stored, or its id is another turn's.
        """

    async def add_judgement(self, key: ApiKeyId, judgement: LoggedJudgement, reason: str) -> bool:
        """Insert what a judge said of an imported turn; False if the turn is judged already.

        Args:
            reason: of the votes, for people.

        Raises:
            RecordUnusable: no imported turn of this key is meant, or it was erased.
        """

    async def is_followed(self, turn: TurnId) -> bool:
        """Whether a later turn continues this one."""


@dataclass(slots=True)
class Imported:
    """
    Args:
        turns: that were added.
        judgements: likewise.
        known: lines whose turn or judgement was there already.
        unusable: lines that were left out.
    """

    turns: int = 0
    judgements: int = 0
    known: int = 0
    unusable: int = 0


def done_of(done: Imported, problems: Sequence[tuple[int, str]]) -> ImportDone:
    """What was done, for people and programs.

    Args:
        problems: number and reason of each line that was left out.
    """
    return ImportDone(
        turns=done.turns,
        judgements=done.judgements,
        known=done.known,
        unusable=done.unusable,
        problems=[UnusableLine(line=line, reason=reason) for line, reason in problems[:NAMED_PROBLEMS]],
    )


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """The newest turn of a session whose next state no line has shown yet."""

    turn: TurnRecord
    number: int
    following: list[Message]


class Importer:
    """
    Args:
        report: gets the place and the reason of each line that cannot be used.
    """

    def __init__(self, store: ImportStore, policy: str, report: Callable[[str, int, str], None]) -> None:
        self._store = store
        self._policy = policy
        self._report = report
        self._newest: dict[str, _Unanswered] = {}
        self._done = Imported()

    async def run(self, files: Iterable[tuple[str, AsyncIterable[bytes]]]) -> Imported:
        """Import all lines of these files, each with its name.

        Raises:
            NotFound: there is no such policy.
            StoreUnavailable: import the same files again: what was stored is known.
        """
        key = await self._store.import_key(self._policy)
        for name, lines in files:
            n = 0
            async for line in lines:
                n += 1
                if not line.strip():
                    continue
                try:
                    await self._line(key, line)
                except RecordUnusable as error:
                    self._done.unusable += 1
                    self._report(name, n, str(error))
        for last in self._newest.values():
            await self._add_next_state(last)
        return self._done

    async def _line(self, key: ApiKeyId, line: bytes) -> None:
        logged = read_line(line, self._policy)
        if isinstance(logged, LoggedJudgement):
            added = await self._store.add_judgement(key, logged, _reason(logged))
            self._done.judgements += added
        else:
            record = _record(logged, key, self._policy)
            added = await self._store.add_turn(record, _why(record))
            self._done.turns += added
            await self._remember(logged.session, _Unanswered(record, logged.number, logged.following))
        self._done.known += not added

    async def _remember(self, session: str, newest: _Unanswered) -> None:
        self._newest.pop(session, None)
        self._newest[session] = newest  # behind those that are older
        if len(self._newest) > OPEN_SESSIONS:
            await self._add_next_state(self._newest.pop(next(iter(self._newest))))

    async def _add_next_state(self, last: _Unanswered) -> None:
        """Add the request that followed a session's newest turn, as far as the log has it: judges take what it says.

        OpenClaw-RL writes a turn once the next request is there, so the newest turn's own line is missing.
        """
        turn = last.turn
        if not last.following or turn.response is None or await self._store.is_followed(turn.turn_id):
            return
        logged = LoggedTurn(
            session=turn.evidence.value or "",
            number=last.number + 1,
            turn_id=following_turn_id(turn.turn_id),
            at=turn.started_at,
            messages=[*turn.messages, turn.response, *last.following],
            reply=None,
            following=[],
            tools=turn.tools,
            status=TurnStatus.ABORTED,
            sampling={},
        )
        record = replace(
            _record(logged, turn.api_key_id, turn.policy), kind_reason=f"imported after turn {last.number}"
        )
        self._done.turns += await self._store.add_turn(record, _why(record))


def turn_mark(number: int) -> str:
    """Why an imported turn is a main turn, by which lines about it find it."""
    return f"imported as turn {number}"


def _record(logged: LoggedTurn, key: ApiKeyId, policy: str) -> TurnRecord:
    return TurnRecord(
        turn_id=logged.turn_id,
        group_id=None,
        choice=0,
        api_key_id=key,
        policy=policy,
        alias=ALIAS,
        evidence=SessionEvidence(SessionSource.IMPORTED, logged.session),
        kind=TurnKind.MAIN,
        kind_reason=turn_mark(logged.number),
        status=logged.status,
        error=None if logged.reply is not None else "imported without a reply",
        version=0,
        engine_id=None,
        messages=logged.messages,
        tools=logged.tools,
        response=logged.reply,
        prompt_ids=None,
        response_ids=None,
        logprobs=None,
        sampling=logged.sampling,
        finish_reason=None,
        ends_session=False,
        started_at=logged.at,
        finished_at=logged.at,
    )


def _why(record: TurnRecord) -> str:
    if record.response is None:
        return NO_REPLY
    reason = why_not_trainable(
        status=record.status,
        sampling=record.sampling,
        tools=record.tools,
        prompt_ids=None,
        response_ids=None,
        logprobs=None,
        unseen=unseen_parts(record.messages),
    )
    return f"{reason} (imported)"


def _reason(logged: LoggedJudgement) -> str:
    """What the judge decided, in words of ours: the log's own may quote the conversation."""
    voted = majority([score for score, _ in logged.votes]) if logged.votes else None
    parts = []
    if logged.verdict is not None:
        by = voted.why if voted is not None and voted.verdict == logged.verdict else "as the log says"
        parts.append(f"verdict {signed(logged.verdict)}: {by}")
    parts.append("a hint" if logged.hint is not None else "no hint")
    return "; ".join(parts)
