"""Prints a session as a conversation: who said what, and under each reply what became of it and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clawloop.cli.show import age, wrapped
from clawloop.contracts.turns import TurnKind, TurnStatus
from clawloop.judging.voting import signed
from clawloop.turns.canonical import is_volatile
from clawloop.turns.titles import plain_text, shortened

if TYPE_CHECKING:
    from clawloop.contracts.turns import Message
    from clawloop.contracts.views import Exchange, SessionDetail, SessionView, TurnView

# Enough to recognise a message; a system prompt of an agent has tens of thousands of characters.
_MESSAGE = 400
_ANSWER = 160
_INDENT = "    "


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
        yield f"at least one sample: {session.guarantee}"


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
    judged = exchange.judged
    for vote in judged.votes:
        score = "?" if vote.score is None else signed(vote.score)
        yield from _labelled(f"judge {score}", _said(vote.answer, full, _ANSWER))
    if turn.hint is not None:
        yield from _labelled("hint", _said(turn.hint, full, _MESSAGE))
    elif judged.hint_why:
        yield from _labelled("no hint", judged.hint_why)
    for given in judged.feedback:
        rating = "comment" if given.score is None else f"rated {given.score:+g}"
        yield from _labelled(rating, f"{_said(given.text or '', full, _MESSAGE)} ({given.effect.replace('_', ' ')})")


def _message(message: Message, full: bool) -> Iterator[str]:
    role = str(message.get("role"))
    text = plain_text(message)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought.strip():
        yield from wrapped(f"{role} thought: {_said(thought, full, _ANSWER)}", "")
    if is_volatile(message) and not full:
        yield f"{role}: (internal context of {len(text)} characters)"
        return
    yield from wrapped(f"{role}: {_said(text, full, _MESSAGE)}", "")


def _said(text: str, full: bool, length: int) -> str:
    return text if full else shortened(" ".join(text.split()), length)


def _labelled(label: str, text: str) -> Iterator[str]:
    yield from wrapped(f"{label:<9} {text}", _INDENT)
