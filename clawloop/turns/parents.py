"""Which recorded turn spoke each assistant message of a request, and so which turn the request follows.

Knows nothing about storage or about when requests arrived. Two things say that a turn spoke a message: its reply
stands there in its own context (the prefix digest is equal), or the same answer stands there alone. The second
is needed because clients rewrite what came before (compaction, pruned tool results, a new system prompt), and it
is doubtful because short answers ("ok") are given twice. A history is told in the order in which it happened, so
the turns that spoke it get older towards its beginning: that settles most doubts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message, TurnKind
from clawloop.ids import TurnId
from clawloop.turns.canonical import prefix_digests, response_digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded turn of the session that has a response.

    Args:
        response_digest: of its response alone.
        reply_digest: prefix digest of its request, extended by its response.
    """

    turn_id: TurnId
    kind: TurnKind
    response_digest: bytes
    reply_digest: bytes


def find_parent(seed: bytes, messages: Sequence[Message], candidates: Sequence[Candidate]) -> TurnId | None:
    """The turn a request follows: the one that spoke the last of its messages we know the speaker of."""
    speakers = find_speakers(seed, messages, candidates)
    return next((speaker.turn_id for speaker in reversed(speakers) if speaker is not None), None)


def find_speakers(seed: bytes, messages: Sequence[Message], candidates: Sequence[Candidate]) -> list[Candidate | None]:
    """Per message the turn that spoke it; None for messages of others and where it is not known.

    No turn speaks two messages, and along the messages turns get newer. A place belongs to the turn whose reply
    stands there in context, the newest of several (a retry with the same answer). Other places go to a turn with
    the same response, the newest that fits in time and stands nowhere in context. Candidates must be older than
    the request. Takes time linear in messages and candidates.
    """
    prefixes = prefix_digests(seed, messages)
    spoken = [message.get("role") == "assistant" for message in messages]
    in_context = _newest_last(candidates, lambda turn: turn.reply_digest)
    standing = {prefix for prefix, is_spoken in zip(prefixes, spoken, strict=True) if is_spoken} & in_context.keys()
    alone = _newest_last(
        [turn for turn in candidates if turn.reply_digest not in standing], lambda turn: turn.response_digest
    )
    floors = _floors(prefixes, spoken, in_context)
    speakers: list[Candidate | None] = [None] * len(messages)
    ceiling: TurnId | None = None
    for place in range(len(messages) - 1, -1, -1):
        if not spoken[place]:
            continue
        speaker = _newest_below(in_context.get(prefixes[place], []), ceiling)
        if speaker is None and (response := response_digest(messages[place])):
            speaker = _newest_between(alone.get(response, []), floors[place], ceiling)
        if speaker is not None:
            speakers[place] = speaker
            ceiling = speaker.turn_id if ceiling is None else min(ceiling, speaker.turn_id)
    return speakers


def _newest_last(candidates: Sequence[Candidate], digest: Callable[[Candidate], bytes]) -> dict[bytes, list[Candidate]]:
    turns = defaultdict(list)
    for candidate in sorted(candidates, key=lambda turn: turn.turn_id):
        turns[digest(candidate)].append(candidate)
    return dict(turns)


def _floors(
    prefixes: Sequence[bytes], spoken: Sequence[bool], in_context: dict[bytes, list[Candidate]]
) -> list[TurnId | None]:
    """Per place the oldest turn id that what stands in context before it leaves possible."""
    floors: list[TurnId | None] = []
    floor: TurnId | None = None
    for prefix, is_spoken in zip(prefixes, spoken, strict=True):
        floors.append(floor)
        if is_spoken and prefix in in_context:
            oldest = in_context[prefix][0].turn_id
            floor = oldest if floor is None else max(floor, oldest)
    return floors


def _newest_below(turns: list[Candidate], ceiling: TurnId | None) -> Candidate | None:
    """The newest turn below the ceiling; where clocks disagree and none is, the oldest: context outweighs them."""
    fitting = (turn for turn in reversed(turns) if ceiling is None or turn.turn_id < ceiling)
    return next(fitting, turns[0] if turns else None)


def _newest_between(turns: list[Candidate], floor: TurnId | None, ceiling: TurnId | None) -> Candidate | None:
    """The newest turn between floor and ceiling.

    Turns at or above the ceiling are taken off for good: it only falls, and each search drops what came before.
    """
    while turns and ceiling is not None and turns[-1].turn_id >= ceiling:
        turns.pop()
    if not turns or (floor is not None and turns[-1].turn_id <= floor):
        return None
    return turns[-1]
