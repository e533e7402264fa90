"""Prints a session as a conversation, and a reply's tokens: what each did, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clawloop.app.cli.terminal import age, printable, running_settings, show_json, show_table, with_database, wrapped
from clawloop.core.contracts.turns import TurnKind, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.judging.voting import signed
from clawloop.core.turns.canonical import is_volatile
from clawloop.core.turns.explain import FORGOTTEN, learned_from
from clawloop.core.turns.titles import plain_text, shortened

if TYPE_CHECKING:
    from clawloop.core.contracts.turns import Message
    from clawloop.core.contracts.views import Exchange, SessionDetail, SessionView, Tokens, TurnView
    from db.database import Database


# Conversations --------------------------------------------------------------------------------------------------------
# Prints a session as a conversation: who said what, and under each reply what became of it and why.

# Enough to recognise a message; a system prompt of an agent has tens of thousands of characters.
_MESSAGE, _MESSAGE_LINES = 400, 12
_ANSWER = 160
_INDENT = "    "
_TAUGHT_BY = {"judge": "hint", "message": "your words", "lessons": "lessons"}


def conversation_lines(detail: SessionDetail, *, full: bool) -> Iterator[str]:
    """The lines that `session show` prints.

    Args:
        full: nothing is shortened, and side turns are shown like others.
    """
    for line in _head(detail.session):
        yield from wrapped(line, "")
    for turn, exchange in zip(detail.turns, detail.conversation or (), strict=True):
        yield ""
        if turn.kind is TurnKind.SIDE and not full:
            yield from wrapped(f"-- side turn {turn.short_id}: {turn.kind_reason}", "")
        else:
            yield from _turn(turn, exchange, full)


def outcome_line(turn: TurnView) -> str:
    """A turn's outcome, verdict, sample and step, in one line."""
    parts = [turn.outcome.replace("_", " ")]
    if turn.verdict is not None:
        parts.append(f"verdict {signed(turn.verdict)} of {turn.votes} valid votes" if turn.votes else _rated(turn))
    if turn.sample is not None:
        reward = "" if turn.reward is None else f", reward {turn.reward:+g}"
        parts.append(f"sample {turn.sample.replace('_', ' ')}{reward}")
    if turn.step is not None:
        parts.append(f"step {turn.step}")
    return " · ".join(parts)


def _rated(turn: TurnView) -> str:
    return f"verdict {signed(turn.verdict or 0)}"


def _head(session: SessionView) -> Iterator[str]:
    yield f"Session {session.short_id}: {session.title or 'without a title'}"
    turns = f"{session.main_turns} turns" + (f" and {session.side_turns} side turns" if session.side_turns else "")
    named = "" if session.external_id is None else f", the client's {session.external_id!r}"
    yield f"{session.state}, {turns}, policy {session.policy}{named}, newest turn {age(session.last_turn_at)} ago"
    if session.closed_why is not None:
        yield f"closed {age(session.closed_at)} ago: {session.closed_why}"
    if session.guarantee is not None:
        yield f"learned from: {learned_from(session.guarantee)}"


def _turn(turn: TurnView, exchange: Exchange, full: bool) -> Iterator[str]:
    number = "side turn" if turn.number is None else f"turn {turn.number}"
    status = "" if turn.status is TurnStatus.COMPLETE else f" · {turn.status}"
    yield f"-- {number} · {turn.short_id} · v{turn.version} · {age(turn.started_at)} ago{status}"
    for message in exchange.said:
        yield from _message(message, full)
    if exchange.reply is not None:
        yield from _message(exchange.reply, full)
    elif turn.status is TurnStatus.ERROR:
        yield from wrapped(f"assistant: no reply: {turn.error or 'the engine failed'}", "")
    else:
        yield "assistant: no reply"
    yield from wrapped(outcome_line(turn), _INDENT)
    yield from _labelled("why", turn.why)
    for lesson in turn.lessons:
        yield from _labelled("lesson", lesson.text or FORGOTTEN)
    judged = exchange.judged
    for vote in judged.votes:
        score = "?" if vote.score is None else signed(vote.score)
        yield from _labelled(f"judge {score}", _said(vote.answer, full, _ANSWER))
    for hint in turn.hints:
        yield from _labelled(_TAUGHT_BY[hint.source], _said(hint.line(), full, _MESSAGE))
    if not turn.hints and judged.hint_why:
        yield from _labelled("no hint", judged.hint_why)
    for given in judged.feedback:
        comment = given.comment_beside(turn.hints)
        if comment or given.score is not None:
            rating = "comment" if given.score is None else f"rated {given.score:+g}"
            yield from _labelled(rating, f"{_said(comment, full, _MESSAGE)} ({given.effect.replace('_', ' ')})")


def _message(message: Message, full: bool) -> Iterator[str]:
    role = str(message.get("role"))
    text = plain_text(message)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought.strip():
        yield from wrapped(f"{role} thought: {_said(thought, full, _ANSWER)}", "")
    if is_volatile(message) and not full:
        yield f"{role}: (internal context of {len(text)} characters)"
        return
    yield from wrapped(f"{role}: {text if full else _beginning(text)}", "")


def _said(text: str, full: bool, length: int) -> str:
    return text if full else shortened(" ".join(text.split()), length)


def _beginning(text: str) -> str:
    """A message's first lines as they are, so that code stays code."""
    lines = text.strip().splitlines()
    return shortened("\n".join([*lines[:_MESSAGE_LINES], *["…"] * (len(lines) > _MESSAGE_LINES)]), _MESSAGE)


def _labelled(label: str, text: str) -> Iterator[str]:
    yield from wrapped(f"{label:<9} {text}", _INDENT)


# Tokens ---------------------------------------------------------------------------------------------------------------
# `clawloop why TURN --tokens`: a reply's tokens with their log-probs, and advantages where a step has trained them.
#
# Heavy imports happen inside a function.

# A prefill of the reply alone; an engine that takes longer is away or busy, and ids do as well.
_TEXTS_SECONDS = 10.0


def show_tokens(turn: str, data: Path | None, *, as_json: bool) -> None:
    async def read(database: Database) -> tuple[Tokens, list[str] | None]:
        from clawloop.operations.reading import Reading
        from db.turns.sessions import PostgresSessionStore

        reading = Reading(PostgresSessionStore(database))
        detail = await reading.detail(turn, tokens=True)
        assert detail.tokens is not None  # asked for
        if as_json or not detail.tokens.response_ids:
            return detail.tokens, None
        session = (await reading.session(str(detail.turn.session_id), limit=1)).session
        return detail.tokens, await _texts(database, data, session.policy, detail.tokens.response_ids)

    tokens, texts = with_database(data, read)
    if as_json:
        show_json(tokens)
        return
    ids = tokens.response_ids or ()
    if not ids:
        typer.echo("no tokens are stored of this reply")
        return
    show_table(
        [
            {
                "id": str(token),
                "log-prob": "" if tokens.logprobs is None else f"{tokens.logprobs[at]:.3f}",
                "advantage": _of_step(tokens.advantages, at),
                **({} if tokens.moves is None else {"moved": _of_step(tokens.moves, at)}),
                "token": "" if texts is None else printable(repr(texts[at])),
            }
            for at, token in enumerate(ids)
        ]
    )
    by = _figures_of(tokens)
    typer.echo(by if texts is not None else f"{by}; no engine told the texts of the tokens")


def _figures_of(tokens: Tokens) -> str:
    if tokens.step is None:
        return "no step has trained it by advantages"
    by = f"advantages as step {tokens.step} used them"
    if tokens.moves is not None:
        by += ", and by how much it moved each log-prob"
    if tokens.moves_seconds is not None:
        by += f" (to read its batch once more took {tokens.moves_seconds:.2f} s)"
    return by


def _of_step(values: Sequence[float | None] | None, at: int) -> str:
    if values is None:
        return ""
    found = values[at]
    return "not trained" if found is None else f"{found:+.3f}"


async def _texts(database: Database, data: Path | None, policy: str, ids: Sequence[int]) -> list[str] | None:
    """The texts of the tokens; None if no engine gives them."""
    from clawloop.app.processes.workers import engine_endpoints
    from clawloop.serving.endpoints import JsonClient, NoReply
    from clawloop.serving.rendering import PATH, texts_of, texts_request
    from db.serving.directory import PostgresDirectoryStore

    directory = await PostgresDirectoryStore(database).read()
    endpoints = engine_endpoints(running_settings(data), lambda: directory)(policy)
    async with JsonClient(_TEXTS_SECONDS) as client:
        try:
            return texts_of((await client.post(endpoints, PATH, texts_request(ids))).body, ids)
        except (NoReply, EngineAnswerUnusable):
            return None
