"""Exports recorded data, one JSON object a line, in pages that can be continued after any of them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Protocol
from uuid import UUID

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.contracts.views import TaughtHint
from clawloop.core.errors import NotFound
from clawloop.core.ids import SessionId
from clawloop.core.turns.files import give_back, references_in

# A page of long conversations is some tens of megabytes.
PAGE = 50
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Record = dict[str, JsonValue]


class ExportKind(StrEnum):
    """The kind of record in each exported line."""

    TURNS = "turns"  # a turn with what followed it, as OpenClaw-RL records turns
    JUDGEMENTS = "judgements"  # verdict, votes and hint of a turn, as OpenClaw-RL records its judge
    CHAT = "chat"  # a conversation with a reply judged good, as chat templates and TRL read it
    OPENAI = "openai"  # the same in OpenAI's fine-tuning form
    PREFERENCE = "preference"  # prompt, completion and whether it was good: TRL's unpaired preferences
    SAMPLES = "samples"
    STEPS = "steps"
    LESSONS = "lessons"  # not those that were erased


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """The records to export; None: all.

    Args:
        since, until: bounds of the turn's begin, or of the time the sample, step or lesson was made; `until` is left
            out.
    """

    policy: str | None = None
    session: SessionId | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class ExportedJudgement:
    """The newest decided judgement of a turn.

    Args:
        hints: what the turn's teachers read.
        votes: each judge's score and answer, in their order; None for an answer that cannot be read.
    """

    verdict: int | None
    reward: float | None
    hints: Sequence[TaughtHint]
    why: str | None
    votes: Sequence[tuple[int | None, str]]


@dataclass(frozen=True, slots=True)
class ExportedTurn:
    """A main turn that was not erased.

    Args:
        session: Clawloop's id; external: the client's own.
        number: among the session's main turns, from 1.
        next_state: the messages that followed the reply; empty if nothing did.
    """

    record: TurnRecord
    session: SessionId
    external: str | None
    number: int
    outcome: str
    next_state: Sequence[Message]
    judgement: ExportedJudgement | None


class ExportStore(Protocol):
    """Reads pages by ascending id, after one. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def has_policy(self, policy: str) -> bool:
        """True if the policy exists, or existed until it was retired."""

    async def turns(
        self, wanted: ExportFilter, after: UUID | None, limit: int, *, judged: bool
    ) -> tuple[list[ExportedTurn], UUID | None]:
        """Turns, and the id of the page's last one, which may be missing from it; None once there are no more.

        Args:
            judged: only those with a decided judgement.
        """

    async def files(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        """Contents of these files, as far as turns of the session have them."""

    async def samples(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]: ...

    async def steps(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]: ...

    async def lessons(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]: ...


class Exporter:
    def __init__(self, store: ExportStore) -> None:
        self._store = store

    async def pages(
        self, kind: ExportKind, wanted: ExportFilter, after: UUID | None, *, with_files: bool = False
    ) -> AsyncIterator[list[Record]]:
        """Records by ascending id; each has its `id`, which continues an export as `after`.

        Args:
            with_files: messages have their images themselves, as clients sent them, in place of references.

        Raises:
            NotFound: there is no such policy.
            StoreUnavailable
        """
        if wanted.policy is not None and not await self._store.has_policy(wanted.policy):
            raise NotFound(f"There is no policy {wanted.policy!r}.", code="policy_not_found", field="policy")
        if kind not in _RECORDS:
            rows = {
                ExportKind.SAMPLES: self._store.samples,
                ExportKind.STEPS: self._store.steps,
                ExportKind.LESSONS: self._store.lessons,
            }
            while page := await rows[kind](wanted, after, PAGE):
                yield page
                after = UUID(str(page[-1]["id"]))
            return
        judged = kind is not ExportKind.TURNS
        while True:
            turns, last = await self._store.turns(wanted, after, PAGE, judged=judged)
            if last is None:
                return
            if with_files:
                turns = [await self._with_files(turn) for turn in turns]
            made = [_RECORDS[kind](turn) for turn in turns]
            yield [record for record in made if record is not None]
            after = last

    async def _with_files(self, turn: ExportedTurn) -> ExportedTurn:
        messages, following = turn.record.messages, turn.next_state
        wanted = references_in([*messages, *following])
        if not wanted:
            return turn
        files = await self._store.files(turn.session, wanted)
        record = replace(turn.record, messages=give_back(messages, files))
        return replace(turn, record=record, next_state=give_back(following, files))


def _turn(turn: ExportedTurn) -> Record | None:
    record, reply = turn.record, turn.record.response or {}
    following: list[JsonValue] = [dict(message) for message in turn.next_state]
    return _place(turn) | {
        "timestamp": record.started_at.isoformat(),
        "messages": list(_request(record)),
        "tools": record.tools,
        "response_text": reply.get("content"),
        "tool_calls": reply.get("tool_calls"),
        "next_state": following[-1] if following else None,
        "followed_by": following,
        "policy": record.policy,
        "version": record.version,
        "status": record.status.value,
        "outcome": turn.outcome,
        "sampling": dict(record.sampling),
        "lessons": [lesson.text or None for lesson in record.lessons],
    }


def _judgement(turn: ExportedTurn) -> Record | None:
    judged = turn.judgement
    if judged is None:
        return None
    agreeing = [raw for score, raw in judged.votes if score and score == judged.verdict]
    hint = "\n".join(each.text for each in judged.hints if each.source == "judge") or None
    return _place(turn) | {
        "score": judged.verdict,
        "votes": ["fail" if score is None else score for score, _ in judged.votes],
        "representative_eval": agreeing[0] if agreeing else None,
        "accepted": hint is not None,
        "hint": hint,
        "hints": [{"text": each.text, "source": each.source} for each in judged.hints],
        "reward": judged.reward,
        "why": judged.why,
    }


def _chat(turn: ExportedTurn) -> Record | None:
    messages = _conversation(turn)
    if messages is None or _verdict(turn) != 1:
        return None
    return {"id": str(turn.record.turn_id), "messages": messages, **_tools(turn.record)}


def _preference(turn: ExportedTurn) -> Record | None:
    messages, verdict = _conversation(turn), _verdict(turn)
    if messages is None or not verdict:
        return None
    return {
        "id": str(turn.record.turn_id),
        "prompt": messages[:-1],
        "completion": messages[-1:],
        "label": verdict == 1,
        **_tools(turn.record),
    }


def _openai(turn: ExportedTurn) -> Record | None:
    if turn.record.response is None or _verdict(turn) != 1:
        return None
    # Thinking has no place in OpenAI's form.
    said = [{**message, "reasoning_content": None} for message in (*_request(turn.record), _reply(turn.record))]
    messages: list[JsonValue] = [
        {name: value for name, value in message.items() if value is not None or name == "content"} for message in said
    ]
    return {"id": str(turn.record.turn_id), "messages": messages, **_tools(turn.record)}


def _verdict(turn: ExportedTurn) -> int | None:
    return None if turn.judgement is None else turn.judgement.verdict


def _conversation(turn: ExportedTurn) -> list[JsonValue] | None:
    """The request and its reply as chat templates read them; None where they cannot."""
    if turn.record.response is None:
        return None
    messages = [_for_templates(message) for message in (*_request(turn.record), _reply(turn.record))]
    return None if None in messages else list(messages)


def _for_templates(message: Record) -> Record | None:
    """A message as chat templates read it: arguments of calls are objects, their ids nine letters and digits, text is
    one string, nothing is null, and who develops is the system.

    None if a call's arguments are no JSON object: a template would end in an error, or teach them in quotes.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict))
    made: Record = {**message, "content": content or ""}
    for name in [name for name, value in made.items() if value is None]:
        del made[name]
    if made.get("role") == "developer":
        made["role"] = "system"
    if "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    if not isinstance(calls, list):
        return made
    parsed: list[JsonValue] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = _arguments(function)
        if arguments is None or not isinstance(call, dict) or not isinstance(function, dict):
            return None
        parsed.append({**call, "id": _short_id(call.get("id")), "function": {**function, "arguments": arguments}})
    return made | {"tool_calls": parsed}


def _short_id(call_id: JsonValue) -> str:
    """Mistral's templates take no other ids, and to all others any will do."""
    text = str(call_id)
    return text if _SHORT_ID.fullmatch(text) else sha256(text.encode(errors="surrogatepass")).hexdigest()[:9]


def _arguments(function: JsonValue) -> JsonValue:
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


_RECORDS: dict[ExportKind, Callable[[ExportedTurn], Record | None]] = {
    ExportKind.TURNS: _turn,
    ExportKind.JUDGEMENTS: _judgement,
    ExportKind.CHAT: _chat,
    ExportKind.OPENAI: _openai,
    ExportKind.PREFERENCE: _preference,
}


def _place(turn: ExportedTurn) -> Record:
    return {
        "id": str(turn.record.turn_id),
        "session_id": turn.external or str(turn.session),
        "session": str(turn.session),
        "turn": turn.number,
    }


def _request(record: TurnRecord) -> list[Record]:
    return [dict(message) for message in record.messages]


def _reply(record: TurnRecord) -> Record:
    kept = ("role", "content", "reasoning_content", "tool_calls")
    return {name: value for name, value in (record.response or {}).items() if name in kept}


def _tools(record: TurnRecord) -> Record:
    return {} if record.tools is None else {"tools": record.tools}
