"""Finds the recorded turn that wrote each assistant message of a request, and so the turn the request follows.

A message belongs to a turn if it is the turn's reply in the same context (the prefix digests are equal), if it stands
where that reply was given (see `places`), or if the answer alone is equal and not empty. The last rule is needed as
clients rewrite what came before (compaction, pruned tool results, a new system prompt). It is ambiguous because short
answers ("ok") occur twice. A history is in the order in which it happened, so its turns get older towards its
beginning: that resolves most ambiguities.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from clawloop.core.contracts.turns import MatchedBy, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import EMPTY_RESPONSE, History
from clawloop.core.turns.places import PlacedReply


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded turn of the session that has a response.

    Args:
        response_digest: digest of the response alone.
        reply_digest: prefix digest of the request, extended by the response.
        asked: digest of the request as matched, in its stored form; None if it is not known.
    """

    turn_id: TurnId
    kind: TurnKind
    response_digest: bytes
    reply_digest: bytes
    asked: bytes | None = None


def find_parent(
    history: History, candidates: Sequence[Candidate], placed: Sequence[PlacedReply] = ()
) -> tuple[TurnId, MatchedBy] | None:
    """The turn a request follows, and how it was found: the one that wrote the last message whose speaker is known."""
    speakers = find_speakers(history, candidates, placed)
    for place in range(len(speakers) - 1, -1, -1):
        if (speaker := speakers[place]) is not None:
            if speaker.reply_digest == history.prefixes[place]:
                return speaker.turn_id, MatchedBy.CONTEXT
            is_placed = any(place in reply.places for reply in placed)
            return speaker.turn_id, MatchedBy.PLACE if is_placed else MatchedBy.REPLY
    return None


def may_be_placed(history: History, candidates: Sequence[Candidate]) -> bool:
    """True if the last reply of a request is not a candidate's in its context: it may be one in other words.

    A reply at the very end is one that the client began itself.
    """
    last = _last_reply(history)
    return last is not None and all(candidate.reply_digest != history.prefixes[last] for candidate in candidates)


def continues_other_words(
    history: History, candidates: Sequence[Candidate], stored: Callable[[bytes], Collection[bytes]]
) -> bool:
    """True if the last reply of a request is a candidate's in its context, and that turn's own request had replies in
    other words: this one has them, too.

    Args:
        stored: the forms in which a digest may be stored.
    """
    last = _last_reply(history)
    if last is None:
        return False
    asked = {turn.asked for turn in candidates if turn.reply_digest == history.prefixes[last]} - {None}
    return bool(asked) and asked.isdisjoint(stored(history.before(last)))


def _last_reply(history: History) -> int | None:
    """Place of the last reply that something follows."""
    return next((place for place in reversed(history.alone) if place < len(history.messages) - 1), None)


def find_speakers(
    history: History, candidates: Sequence[Candidate], placed: Sequence[PlacedReply] = ()
) -> list[Candidate | None]:
    """For each message the turn that wrote it; None for messages of others, and where the turn is not known.

    No turn writes two messages, but for the pieces of one reply, and along the messages turns get newer. A message
    belongs to the turn whose reply it is in context, the newest of several (a retry with the same answer); else to the
    one whose reply was found by its place. Other messages go to a turn with the same response, if it is not empty: the
    newest that fits in time and has no message yet. Takes time linear in messages and candidates.

    Args:
        candidates: all older than the request.
        placed: replies that were found by their place, of the same session.
    """
    prefixes = history.prefixes
    is_answer = [place in history.alone for place in range(len(prefixes))]
    in_context = _newest_last(candidates, lambda turn: turn.reply_digest)
    matched = {prefix for prefix, answer in zip(prefixes, is_answer, strict=True) if answer} & in_context.keys()
    by_place = {place: Candidate(reply.turn_id, reply.kind, b"", b"") for reply in placed for place in reply.places}
    taken = {reply.turn_id for reply in placed}
    alone = _newest_last(
        [
            turn
            for turn in candidates
            if turn.reply_digest not in matched and turn.response_digest != EMPTY_RESPONSE and turn.turn_id not in taken
        ],
        lambda turn: turn.response_digest,
    )
    floors = _floors(prefixes, is_answer, in_context)
    speakers: list[Candidate | None] = [None] * len(prefixes)
    ceiling: TurnId | None = None
    for place in reversed(history.alone):
        speaker = _newest_below(in_context.get(prefixes[place], []), ceiling) or by_place.get(place)
        if speaker is None:
            speaker = _newest_between(alone.get(history.alone[place], []), floors[place], ceiling)
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
    prefixes: Sequence[bytes], is_answer: Sequence[bool], in_context: dict[bytes, list[Candidate]]
) -> list[TurnId | None]:
    """Lower bound of each message's turn id: its turn is newer than the turns of the messages before it."""
    floors: list[TurnId | None] = []
    floor: TurnId | None = None
    for prefix, answer in zip(prefixes, is_answer, strict=True):
        floors.append(floor)
        if answer and prefix in in_context:
            oldest = in_context[prefix][0].turn_id
            floor = oldest if floor is None else max(floor, oldest)
    return floors


def _newest_below(turns: list[Candidate], ceiling: TurnId | None) -> Candidate | None:
    """The newest turn below the ceiling; if clocks disagree and there is none, the oldest: context outweighs clocks."""
    fitting = (turn for turn in reversed(turns) if ceiling is None or turn.turn_id < ceiling)
    return next(fitting, turns[0] if turns else None)


def _newest_between(turns: list[Candidate], floor: TurnId | None, ceiling: TurnId | None) -> Candidate | None:
    """The newest turn between floor and ceiling.

    Turns at or above the ceiling are removed for good: the ceiling only falls, so later searches never need them.
    """
    while turns and ceiling is not None and turns[-1].turn_id >= ceiling:
        turns.pop()
    if not turns or (floor is not None and turns[-1].turn_id <= floor):
        return None
    return turns[-1]
