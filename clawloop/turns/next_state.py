"""Next states: what the user or a tool wrote after a turn's response. Judges take it as evidence.

`parents` decides which turn wrote which answer in a request, so retries, edits, forks and rewritten histories need no
rule here: an answer that no later request holds has no next state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message, TurnKind
from clawloop.ids import TurnId
from clawloop.turns.canonical import is_volatile
from clawloop.turns.classify import is_side_prompt
from clawloop.turns.parents import Candidate, find_speakers


@dataclass(frozen=True, slots=True)
class NextState:
    """What followed a response.

    Args:
        next_turn_id: the turn whose request holds it.
        messages: tool results and user messages, unchanged and in their order; never empty.
    """

    next_turn_id: TurnId
    messages: list[Message]


def next_states(seed: bytes, messages: Sequence[Message], turns: Sequence[Candidate]) -> dict[TurnId, list[Message]]:
    """For each main turn whose response the main request holds, the messages that follow; none without any.

    The first main request that holds a turn's next state decides it; later requests repeat it.

    Args:
        turns: the session's recorded turns that are older than the request, main and side.
    """
    states: dict[TurnId, list[Message]] = {}
    following: list[Message] = []  # belongs to no turn before the first answer
    after_side = False
    may_be_prompt = False  # the last message of `following` may turn out to prompt a side turn
    for message, speaker in zip(messages, find_speakers(seed, messages, turns), strict=True):
        if is_volatile(message):
            continue
        if speaker is not None and speaker.kind is TurnKind.SIDE:
            if may_be_prompt:
                following.pop()
            after_side, may_be_prompt = True, False
        elif message.get("role") == "assistant":
            following = []
            if speaker is not None:
                states[speaker.turn_id] = following
            after_side = may_be_prompt = False
        elif is_side_prompt(message) or (after_side and message.get("role") == "tool"):
            may_be_prompt = False
        else:
            following.append(message)
            after_side, may_be_prompt = False, message.get("role") == "user"
    return {turn_id: state for turn_id, state in states.items() if state}
