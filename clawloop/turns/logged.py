"""Reads lines of a log that OpenClaw-RL or `clawloop export` wrote: turns, and what its judge said of them.

OpenClaw-RL's `response_text` is the rendered reply, with thinking, markup of tool calls and end marks. They are taken
out, so that later requests are recognised as continuing the reply.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field, JsonValue, StrictInt, StrictStr, ValidationError

from clawloop.contracts.turns import Message, TurnStatus
from clawloop.errors import RecordUnusable
from clawloop.ids import TurnId, logged_turn_id
from clawloop.turns.thinking import without_leading_thinking

LONGEST_LINE = 64 * 1024 * 1024
"""Twice the largest request that a gateway takes."""

# One at a time, and no longer than any is: a reply that repeats itself must not cost the square of its length.
_END_MARK = re.compile(r"(?:<\|[a-z_]+\|>|<｜[^｜<>]+｜>|</s>|<eos>|<end_of_turn>)\Z")
_LONGEST_END_MARK = 64
_CALLS = re.compile(r"<tool_call>.*?</tool_call>\s*", re.DOTALL)
_VOTES: dict[float, Literal[-1, 0, 1]] = {-1.0: -1, 0.0: 0, 1.0: 1}
# PostgreSQL and the ids of turns need a time after 1970.
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A main turn of a log.

    Args:
        session: the client's own id.
        number: of the turn, as the log counts.
        reply: None if it was not recorded.
        following: what followed the reply: the whole next state of our own export, the last message of OpenClaw-RL's.
        turn_id: the line's own id, else one that the same line always gets.
    """

    session: str
    number: int
    turn_id: TurnId
    at: datetime
    messages: list[Message]
    reply: Message | None
    following: list[Message]
    tools: list[JsonValue] | None
    status: TurnStatus
    sampling: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class LoggedHint:
    """One answer of the judge with a hint; `text` is None if it has none, `accepted` if it cannot be read."""

    raw: str
    accepted: bool | None
    text: str | None


@dataclass(frozen=True, slots=True)
class LoggedJudgement:
    """What the judge said of a turn.

    Args:
        turn_id: None where session and number name the turn.
        votes: each vote's score and the judge's answer, as far as it was logged; a score of None cannot be read.
        hint: the one that was chosen; None if there was none.
    """

    session: str
    number: int
    turn_id: TurnId | None
    verdict: Literal[-1, 0, 1] | None
    votes: list[tuple[Literal[-1, 0, 1] | None, str]]
    hints: list[LoggedHint]
    hint: str | None
    reward: float | None
    why: str | None


class _Place(BaseModel):
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    turn: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
    id: UUID | None = None


class _TurnLine(_Place):
    timestamp: datetime
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    prompt_text: StrictStr | None = None
    response_text: StrictStr | None = None
    tool_calls: list[JsonValue] | None = None
    next_state: dict[str, JsonValue] | None = None
    followed_by: list[dict[str, JsonValue]] | None = None
    tools: list[JsonValue] | None = None
    status: TurnStatus | None = None
    sampling: dict[str, JsonValue] = Field(default_factory=dict)


class _JudgementLine(_Place):
    score: float | None = None
    votes: list[JsonValue] = Field(default_factory=list)
    representative_eval: StrictStr | None = None
    accepted: bool | None = None
    hint: StrictStr | None = None
    reward: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    why: Annotated[StrictStr, Field(max_length=2000)] | None = None


def read_line(line: bytes, policy: str) -> LoggedTurn | LoggedJudgement:
    """What one line of a log says.

    Args:
        policy: whose turns they become; it is part of the ids of turns that have none.

    Raises:
        RecordUnusable: the line cannot be used; the message names the field and quotes nothing of a conversation.
    """
    if len(line) > LONGEST_LINE:
        raise RecordUnusable(f"longer than {LONGEST_LINE // 1024**2} MiB")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise RecordUnusable(f"not JSON{where}") from None
    if not isinstance(body, dict):
        raise RecordUnusable("not a JSON object")
    if "messages" in body:
        return _turn(_checked(_TurnLine, body), policy)
    if body.keys() & {"score", "votes", "accepted"}:
        return _judgement(_checked(_JudgementLine, body))
    raise RecordUnusable("neither a turn (`messages`) nor a judgement (`score`, `votes` or `accepted`)")


def _checked(model: type[Any], body: dict[str, Any]) -> Any:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RecordUnusable(f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _turn(line: _TurnLine, policy: str) -> LoggedTurn:
    at = line.timestamp if line.timestamp.tzinfo is not None else line.timestamp.replace(tzinfo=UTC)
    if at < _EARLIEST:
        raise RecordUnusable("`timestamp`: before the year 2000")
    if any(not isinstance(message.get("role"), str) for message in line.messages):
        raise RecordUnusable("`messages`: each message needs a `role`")
    reply = _reply(line)
    status = line.status or TurnStatus.COMPLETE
    if reply is None and status in (TurnStatus.COMPLETE, TurnStatus.LENGTH):
        status = TurnStatus.ABORTED
    following = line.followed_by or ([] if line.next_state is None else [line.next_state])
    return LoggedTurn(
        session=line.session_id,
        number=line.turn,
        turn_id=TurnId(line.id) if line.id is not None else _id_of(line, at, policy),
        at=at,
        messages=line.messages,
        reply=reply,
        following=following,
        tools=line.tools,
        status=status,
        sampling=line.sampling,
    )


def _id_of(line: _TurnLine, at: datetime, policy: str) -> TurnId:
    said = [policy, line.session_id, line.turn, at.isoformat(), line.messages, line.response_text, line.tool_calls]
    return logged_turn_id(at, line.turn, sha256(json.dumps(said, sort_keys=True).encode()).digest())


def _reply(line: _TurnLine) -> Message | None:
    text, calls = line.response_text, line.tool_calls or None
    if text is None and calls is None:
        return None
    if text is None or line.prompt_text is None:
        whole: Message = {"role": "assistant", "content": text}
        return whole if calls is None else whole | {"tool_calls": calls}
    text = _without_end_marks(text)
    content = without_leading_thinking(text)
    thinking = text[: len(text) - len(content)].replace("<think>", "").replace("</think>", "").strip()
    if calls is not None:
        content = _CALLS.sub("", content)
    reply: Message = {"role": "assistant", "content": content.strip() or None}
    if thinking:
        reply["reasoning_content"] = thinking
    return reply if calls is None else reply | {"tool_calls": calls}


def _without_end_marks(text: str) -> str:
    end = len(text.rstrip())
    while mark := _END_MARK.search(text, max(0, end - _LONGEST_END_MARK), end):
        end = mark.start()
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _judgement(line: _JudgementLine) -> LoggedJudgement:
    if line.score is not None and line.score not in _VOTES:
        raise RecordUnusable("`score`: must be -1, 0 or 1")
    verdict = None if line.score is None else _VOTES[line.score]
    votes: list[tuple[Literal[-1, 0, 1] | None, str]] = []
    hints: list[LoggedHint] = []
    for n, vote in enumerate(line.votes):
        if isinstance(vote, dict):
            hints.append(_hint(vote))
        elif vote is None or vote == "fail":
            votes.append((None, ""))
        elif isinstance(vote, int | float) and not isinstance(vote, bool) and vote in _VOTES:
            votes.append((_VOTES[vote], ""))
        else:
            raise RecordUnusable(f'`votes.{n}`: must be -1, 0, 1 or "fail", or an answer with a hint')
    if line.representative_eval is not None:
        agreeing = next((n for n, (score, _) in enumerate(votes) if score and score == verdict), None)
        if agreeing is not None:
            votes[agreeing] = (verdict, line.representative_eval)
    hint = (line.hint or "").strip() if line.accepted is not False else ""
    if hint and not hints:
        hints.append(LoggedHint(hint, True, hint))
    return LoggedJudgement(
        session=line.session_id,
        number=line.turn,
        turn_id=None if line.id is None else TurnId(line.id),
        verdict=verdict,
        votes=votes,
        hints=hints,
        hint=hint or None,
        reward=line.reward,
        why=line.why,
    )


def _hint(vote: dict[str, JsonValue]) -> LoggedHint:
    raw, text, score = vote.get("raw"), vote.get("hint"), vote.get("score")
    hint = text.strip() if score == 1 and isinstance(text, str) else ""
    accepted = None if score not in (1, -1) else bool(hint)
    return LoggedHint(raw if isinstance(raw, str) else "", accepted, hint or None)
