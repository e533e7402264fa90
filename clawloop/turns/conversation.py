"""Which known conversation a request continues, when nothing names its session.

Knows nothing about where known prefixes are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message
from clawloop.ids import SessionId, TurnId
from clawloop.turns.canonical import prefix_digests


@dataclass(frozen=True, slots=True)
class ConversationLookup:
    """What to look for.

    Args:
        replies: prefix digests right after each assistant message, oldest first.
        whole: digest of the whole request.
        has_assistant: whether any assistant message stands in the request.
    """

    replies: list[bytes]
    whole: bytes
    has_assistant: bool


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """A stored prefix: what stood after a turn's reply (`is_reply`), or the whole request of that turn.

    Args:
        completed: the turn's reply reached its end.
    """

    digest: bytes
    turn_id: TurnId
    session_id: SessionId
    is_reply: bool
    completed: bool


def lookup(seed: bytes, messages: Sequence[Message]) -> ConversationLookup:
    """The digests under which a conversation that these messages continue may be known."""
    digests = prefix_digests(seed, messages)
    replies = [digest for digest, message in zip(digests, messages, strict=True) if message.get("role") == "assistant"]
    return ConversationLookup(replies, digests[-1] if digests else seed, bool(replies))


def choose_session(lookup: ConversationLookup, known: Sequence[KnownPrefix]) -> SessionId | None:
    """The session the request continues; None when it starts one.

    The deepest reply in the request wins, the newest turn among equals: so an edited history goes on as a branch
    of its session. Where no reply is known, the request starts a session, unless it repeats a whole request
    whose reply never completed and that nobody has asked anew with success since.
    """
    depth = {digest: place for place, digest in enumerate(lookup.replies)}
    reply = max(
        (prefix for prefix in known if prefix.is_reply and prefix.digest in depth),
        key=lambda prefix: (depth[prefix.digest], prefix.turn_id),
        default=None,
    )
    if reply is not None:
        return reply.session_id
    asked = max(
        (prefix for prefix in known if not prefix.is_reply and prefix.digest == lookup.whole),
        key=lambda prefix: prefix.turn_id,
        default=None,
    )
    return asked.session_id if asked is not None and not asked.completed else None
