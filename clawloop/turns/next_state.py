"""What the user or a tool said next: the evidence about a response.

Knows nothing about storage, judges or rewards. Whose answer stands where in a request is decided by `parents`, so
retries, edits, forks and rewritten histories need no rule of their own here: an answer that no later request
holds has no next state.
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
class LaterRequest:
    """A recorded request of the session: the turn it made, its kind and its messages, untouched."""

    turn_id: TurnId
    kind: TurnKind
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class NextState:
    """What followed a response.

    Args:
        next_turn_id: the turn whose request showed it.
        messages: what followed, untouched: several tool results, user messages, in their order. Never empty.
    """

    next_turn_id: TurnId
    messages: list[Message]


def next_states(seed: bytes, messages: Sequence[Message], turns: Sequence[Candidate]) -> dict[TurnId, list[Message]]:
    """What one main request says about each main turn whose response it holds and something follows.

    `turns`: the recorded turns of the session that are older than the request, main and side. A turn's next
    state is what the first such request says; later ones repeat it.
    """
    states: dict[TurnId, list[Message]] = {}
    following: list[Message] = []  # of no turn until the first one has spoken
    after_side = False
    prompt_kept = False  # the message just before is in `following` and may turn out to prompt a side turn
    for message, speaker in zip(messages, find_speakers(seed, messages, turns), strict=True):
        if is_volatile(message):
            continue
        if speaker is not None and speaker.kind is TurnKind.SIDE:
            if prompt_kept:
                following.pop()
            after_side, prompt_kept = True, False
        elif message.get("role") == "assistant":
            following = []
            if speaker is not None:
                states[speaker.turn_id] = following
            after_side = prompt_kept = False
        elif is_side_prompt(message) or (after_side and message.get("role") == "tool"):
            prompt_kept = False
        else:
            following.append(message)
            after_side, prompt_kept = False, message.get("role") == "user"
    return {turn_id: state for turn_id, state in states.items() if state}


def next_state(
    seed: bytes, turn_id: TurnId, turns: Sequence[Candidate], later: Sequence[LaterRequest]
) -> NextState | None:
    """What follows a turn's response in the first later main request that holds it; None: none does.

    Args:
        turns: the session's recorded turns with their digests, this one among them.
        later: recorded requests of the session, in any order; those of side turns and older ones are passed over.
    """
    for request in sorted(later, key=lambda request: request.turn_id):
        if request.kind is not TurnKind.MAIN:
            continue
        known = [turn for turn in turns if turn.turn_id < request.turn_id]  # this one too, or it shows nothing
        state = next_states(seed, request.messages, known).get(turn_id)
        if state is not None:
            return NextState(request.turn_id, state)
    return None
