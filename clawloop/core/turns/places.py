"""Finds replies by their place where a client sends them back in other words.

Clients rename call ids, send `{}` for arguments that nobody could parse, reorder or split parallel calls, drop the text
beside a call, remove markers, and normalise text. Such a message is still known by its place: it stands directly after
exactly what one recorded turn alone was asked, with the same calls and the same text. What cannot be told apart is not
found: a false match would teach a wrong thing.

From there on the conversation is read as matched: with the recorded reply in place of the client's, and results of
tools under the recorded call ids. So the replies after it are found, too, and turns store the digest of what they were
asked in this form.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import orjson
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import (
    EMPTY_RESPONSE,
    History,
    arguments_of,
    call_id,
    canonical,
    extend_digest,
    response_digest,
    text_parts,
)
from clawloop.core.turns.encoding import encode

# What OpenClaw takes out of a reply before it keeps it.
_MARKERS = re.compile(r"\[\[\s*(?:reply_to_current|reply_to\s*:[^\]\n]{1,100}|audio_as_voice)\s*\]\]")


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A recorded turn of the session that has a response.

    Args:
        asked: digest of the messages it was asked, as matched; in its stored form.
        response: the whole reply.
        ended: the client saw its end.
    """

    turn_id: TurnId
    kind: TurnKind
    asked: bytes
    response: Message
    ended: bool = True


@dataclass(frozen=True, slots=True)
class PlacedReply:
    """A reply that was found by its place.

    Args:
        places: of the assistant messages that are the reply: several where a client splits parallel calls.
    """

    turn_id: TurnId
    kind: TurnKind
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """
    Args:
        whole: digest of all messages, as matched.
    """

    replies: list[PlacedReply]
    whole: bytes


@dataclass(slots=True)
class _Pieces:
    """The assistant messages that together are a reply, and how their call ids were recorded."""

    places: list[int]
    results: list[int] = field(default_factory=list)  # places of tool messages between them
    recorded_ids: dict[JsonValue, JsonValue] = field(default_factory=dict)


def _as_stored(digest: bytes) -> Collection[bytes]:
    return (digest,)


def find_places(
    history: History, turns: Sequence[AskedTurn], stored: Callable[[bytes], Collection[bytes]] = _as_stored
) -> Placed:
    """The replies of these turns that stand where each was given.

    Linear in the messages and the turns.

    Args:
        turns: of the session, all older than the request.
        stored: the forms in which a digest may be stored.
    """
    by_asked: dict[bytes, list[AskedTurn]] = defaultdict(list)
    for turn in turns:
        by_asked[turn.asked].append(turn)
    found: list[PlacedReply] = []
    taken: set[TurnId] = set()
    recorded_ids: dict[JsonValue, JsonValue] = {}
    matched = history.seed
    place = 0
    while place < len(history.messages):
        message = history.messages[place]
        if place in history.alone:
            asked = {
                turn.turn_id: turn
                for digest in dict.fromkeys((history.before(place), matched))
                for form in stored(digest)
                for turn in by_asked.get(form, ())
            }
            said = _said_here(list(asked.values()), history, place)
            if said is not None and said[0].turn_id not in taken:
                speaker, pieces = said
                taken.add(speaker.turn_id)
                found.append(PlacedReply(speaker.turn_id, speaker.kind, tuple(pieces.places)))
                recorded_ids |= pieces.recorded_ids
                matched = extend_digest(matched, speaker.response)
                for between in pieces.results:
                    matched = extend_digest(matched, _with_recorded_id(history.messages[between], recorded_ids))
                place = pieces.places[-1] + 1
                continue
            recorded_ids |= _own_ids(message)
        matched = extend_digest(matched, _with_recorded_id(message, recorded_ids))
        place += 1
    return Placed(found, matched)


def is_said(response: Message, messages: Sequence[Message]) -> bool:
    """True if the first of these messages, or the first pieces of them, are this reply in a client's words."""
    return _pieces(response, messages, 0) is not None


def _said_here(asked: Sequence[AskedTurn], history: History, place: int) -> tuple[AskedTurn, _Pieces] | None:
    """The turn whose reply stands at this place, among the turns that were asked the messages before it."""
    exact = [turn for turn in asked if response_digest(turn.response) == history.alone[place] != EMPTY_RESPONSE]
    if exact:
        return max(exact, key=lambda turn: turn.turn_id), _Pieces(
            [place], recorded_ids=_own_ids(history.messages[place])
        )
    # A request that was cut off and sent again has a reply without an end beside the one that the client got.
    asked = [turn for turn in asked if turn.ended] or asked
    if len(asked) != 1:
        return None
    pieces = _pieces(asked[0].response, history.messages, place)
    return None if pieces is None else (asked[0], pieces)


def _pieces(response: Message, messages: Sequence[Message], place: int) -> _Pieces | None:
    wanted, said = _calls(response), _plain(response)
    if not wanted and not said:
        return None
    pieces, texts, calls = _Pieces([]), list[str](), list[tuple[JsonValue, str, JsonValue]]()
    ids: set[JsonValue] = set()
    while place < len(messages) and len(pieces.places) <= len(wanted) + 1:
        message = messages[place]
        if message.get("role") == "assistant":
            pieces.places.append(place)
            texts.append(_plain(message))
            calls += _calls(message)
            ids.update(identity for identity, _, _ in calls if isinstance(identity, str))
            text = " ".join(part for part in texts if part)
            if len(calls) > len(wanted):
                return None
            if len(calls) == len(wanted) and (text == said or (wanted and not text)):
                mapped = _recorded_ids(calls, wanted)
                if mapped is None:
                    return None
                pieces.recorded_ids = mapped
                # A result behind the last piece belongs to what follows.
                pieces.results = [between for between in pieces.results if between < pieces.places[-1]]
                return pieces
        elif message.get("role") == "tool" and calls and call_id(message.get("tool_call_id")) in ids:
            pieces.results.append(place)
        else:
            return None
        place += 1
    return None


def _calls(message: Message) -> list[tuple[JsonValue, str, JsonValue]]:
    """Id, name and arguments of each call."""
    calls = message.get("tool_calls")
    found: list[tuple[JsonValue, str, JsonValue]] = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(call, dict) and isinstance(function, dict):
            identity = call_id(call.get("id"))
            name = function.get("name")
            arguments = arguments_of(function.get("arguments"))
            found.append((identity if isinstance(identity, str) else "", str(name), arguments))
    return found


def _own_ids(message: Message) -> dict[JsonValue, JsonValue]:
    """The ids of the message's calls, each mapped to itself: earlier calls may have had the same ids."""
    return {identity: identity for identity, _, _ in _calls(message)}


def _recorded_ids(
    calls: Sequence[tuple[JsonValue, str, JsonValue]], recorded: Sequence[tuple[JsonValue, str, JsonValue]]
) -> dict[JsonValue, JsonValue] | None:
    """The recorded id of each call; None if these are other calls.

    Equal calls are taken in their order. Arguments that were recorded as no JSON may come back as `{}`.
    """
    by_call: dict[tuple[str, bytes], deque[JsonValue]] = defaultdict(deque)
    unparsable: dict[str, deque[tuple[bytes, JsonValue]]] = defaultdict(deque)
    for identity, name, arguments in recorded:
        by_call[name, _composed(arguments)].append(identity)
        if isinstance(arguments, str):
            unparsable[name].append((_composed(arguments), identity))
    mapped: dict[JsonValue, JsonValue] = {}
    empty: list[tuple[JsonValue, str]] = []
    for identity, name, arguments in calls:
        if same := by_call[name, _composed(arguments)]:
            mapped[identity] = same.popleft()
        elif arguments == {}:
            empty.append((identity, name))
        else:
            return None
    for identity, name in empty:
        while unparsable[name] and not by_call[name, unparsable[name][0][0]]:
            unparsable[name].popleft()
        if not unparsable[name]:
            return None
        written, _ = unparsable[name].popleft()
        mapped[identity] = by_call[name, written].popleft()
    return mapped


def _composed(value: JsonValue) -> bytes:
    """The value's encoding, with its texts in Unicode's composed form where they can be written as JSON."""
    encoded = encode(value)
    if encoded.isascii():
        return encoded
    try:
        return encode(orjson.loads(unicodedata.normalize("NFC", orjson.dumps(value).decode())))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError):
        return encoded


def _plain(message: Message) -> str:
    """A message's text without thinking, markers and differences of white space, in Unicode's composed form."""
    text = "".join(text_parts(canonical(message)))
    return " ".join(unicodedata.normalize("NFC", _MARKERS.sub(" ", text)).split())


def _with_recorded_id(message: Message, recorded_ids: dict[JsonValue, JsonValue]) -> Message:
    if message.get("role") != "tool":
        return message
    identity = call_id(message.get("tool_call_id"))
    recorded = recorded_ids.get(identity) if isinstance(identity, str) else None
    return message if recorded is None else message | {"tool_call_id": recorded}
