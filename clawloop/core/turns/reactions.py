"""Reads reactions to replies, such as a thumb in Telegram, out of what OpenClaw adds to a request.

OpenClaw queues them as system events and puts them into the internal context of the next request, which may be a
heartbeat: `System: [2026-11-23 12:54:48 UTC] Telegram reaction added: 👍 by Alice (@alice) on msg 42`. It writes each
piece of that context as one JSON string, and the time before the first line of an event alone; so text that people
write, and that it quotes there, makes no such line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import is_volatile, text_parts

_EVENT = re.compile(r"System: \[[^\]\n]{4,60}\] \w{1,40} reaction added: (?P<emoji>\S{1,40}) by \S")
_ALL_EVENTS = "System: "
# Variations of one emoji: as a picture, and in skin tones.
_VARIATIONS = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")
_NAMES_UP = ("+1", "thumbsup", "heart", "fire", "tada", "clap", "pray", "100", "heart_eyes", "ok_hand")
_UP = frozenset({*"👍❤🔥🎉👏🙏💯😍🥰🤩👌🏆💪", *_NAMES_UP})
_DOWN = frozenset({*"👎💩🤮😡🤬", *("-1", "thumbsdown", "poop", "hankey", "face_vomiting", "rage")})


@dataclass(frozen=True, slots=True)
class Reaction:
    """
    Args:
        event: the line that tells of it, with its time.
        score: 1 or −1.
    """

    event: str
    score: float


def newest_reaction(messages: Sequence[Message]) -> Reaction | None:
    """The last reaction that praises or blames, in what a client added to the end of one request; None without any."""
    added = takewhile(is_volatile, reversed(messages))
    events = [event for message in added for text in text_parts(message) for event in _events(text)]
    found = [Reaction(event, score) for event in events if (score := _score(event)) is not None]
    return found[-1] if found else None


def _events(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        if not line.startswith(f'"{_ALL_EVENTS}'):
            continue
        try:
            said = json.loads(line)
        except ValueError:
            continue
        events = said.splitlines() if isinstance(said, str) else []
        if all(event.startswith(_ALL_EVENTS) for event in events):
            found += events
    return found


def _score(event: str) -> float | None:
    match = _EVENT.match(event)
    # Slack writes `:+1:` and `:+1::skin-tone-2:`.
    emoji = _VARIATIONS.sub("", match["emoji"].strip(":").partition("::")[0]) if match else ""
    return 1.0 if emoji in _UP else -1.0 if emoji in _DOWN else None
