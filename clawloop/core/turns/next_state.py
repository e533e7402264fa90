"""Next states: what the user or a tool wrote after a turn's response. Judges take it as evidence.

`parents` decides which turn wrote which answer in a request, so retries, edits, forks and rewritten histories need no
rule here: an answer that no later request holds has no next state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import History, canonical, is_volatile
from clawloop.core.turns.classify import begins_as_chore, is_side_prompt, last_said, looks_like_chore
from clawloop.core.turns.parents import Candidate, find_speakers
from clawloop.core.turns.places import PlacedReply


@dataclass(frozen=True, slots=True)
class NextState:
    """The messages that followed a response.

    Args:
        next_turn_id: the turn whose request holds it.
        messages: tool results and user messages, unchanged and in their order; never empty.
        behind_tools: the user said this of the answer that the reply's tool calls led to, and nothing before.
    """

    next_turn_id: TurnId
    messages: list[Message]
    behind_tools: bool = False


def next_states(
    seed: bytes, messages: Sequence[Message], turns: Sequence[Candidate], placed: Sequence[PlacedReply] = ()
) -> dict[TurnId, list[Message]]:
    """For each main turn whose response the main request holds, the messages that follow; none without any.

    The first main request that holds a turn's next state decides it; later requests repeat it.

    Args:
        turns: the session's recorded turns that are older than the request, main and side.
        placed: replies in the request that were found by their place.
    """
    states: dict[TurnId, list[Message]] = {}
    following: list[Message] = []  # belongs to no turn before the first answer
    after_side = False
    may_be_prompt = False  # the last message of `following` may turn out to prompt a side turn
    answering: TurnId | None = None  # of whose reply `following` comes after
    for message, speaker in zip(messages, find_speakers(History(seed, messages), turns, placed), strict=True):
        if is_volatile(message) or message.get("role") in ("system", "developer"):
            continue  # a client's, which some add behind each message of a person
        if speaker is not None and speaker.turn_id == answering:
            continue  # a further piece of one reply
        if speaker is not None and speaker.kind is TurnKind.SIDE:
            answering = speaker.turn_id
            if may_be_prompt:
                following.pop()
            after_side, may_be_prompt = True, False
        elif message.get("role") == "assistant":
            following = []
            answering = None
            if speaker is not None:
                answering = speaker.turn_id
                states[speaker.turn_id] = following
            after_side = may_be_prompt = False
        elif is_side_prompt(message) or (after_side and message.get("role") == "tool"):
            may_be_prompt = False
        else:
            following.append(message)
            after_side, may_be_prompt = False, message.get("role") == "user"
    return {turn_id: state for turn_id, state in states.items() if state}


def is_doubtful(messages: Sequence[Message], state: Sequence[Message]) -> bool:
    """True if a next state is only what this request asks, and that looks like a client's chore.

    Calls of tools and their results may follow: a client's own chore may need tools, too.
    """
    last = _last_asked(messages)
    return any(message is last for message in state) and chore_asked(messages)


def chore_asked(messages: Sequence[Message]) -> bool:
    """True if what this request asks may be a client's chore, which may have gone on with tools."""
    last = _last_asked(messages)
    return last is not None and (looks_like_chore([last]) or begins_as_chore(messages))


def goes_on(messages: Sequence[Message]) -> bool:
    """True if the request asks for nothing new, but goes on with the results of tools."""
    last = last_said(messages)
    return last is not None and last.get("role") == "tool"


def _last_asked(messages: Sequence[Message]) -> Message | None:
    users = (message for message in reversed(messages) if message.get("role") == "user" and not is_volatile(message))
    return next(users, None)


def holds_exchange(
    seed: bytes,
    messages: Sequence[Message],
    turns: Sequence[Candidate],
    placed: Sequence[PlacedReply],
    asked: Sequence[Message],
    turn_id: TurnId,
    *,
    asks_more: bool = True,
) -> bool:
    """True if these messages hold a turn's reply right after the last message that it was asked, and ask for more.

    A summary that a person asked for stays in the conversation; a client that summarises for itself keeps only the
    summary, or the calls of tools by which it was made.

    Args:
        asks_more: False: results of tools may be all that follows.
    """
    prompt = last_said(asked)
    for place, speaker in enumerate(find_speakers(History(seed, messages), turns, placed)):
        if speaker is not None and speaker.turn_id == turn_id:
            before = last_said(messages[:place])
            held = prompt is not None and before is not None and canonical(before) == canonical(prompt)
            return held and (not asks_more or _last_asked(messages[place:]) is not None)
    return False
