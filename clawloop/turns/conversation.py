"""Finds the session a request continues by its messages, when nothing names the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message
from clawloop.ids import SessionId, TurnId
from clawloop.turns.canonical import is_volatile, prefix_digests


@dataclass(frozen=True, slots=True)
class ConversationLookup:
    """Digests to look up for a request.

    Args:
        replies: prefix digests right after each assistant message, oldest first.
        whole: digest of the whole request.
        root: digest up to the first user message, which all requests of a conversation share.
        has_assistant: the request holds an assistant message.
    """

    replies: list[bytes]
    whole: bytes
    root: bytes
    has_assistant: bool


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """A stored prefix: a turn's request with its reply (`is_reply`), or the turn's whole request.

    Args:
        completed: the turn's reply is complete.
    """

    digest: bytes
    turn_id: TurnId
    session_id: SessionId
    is_reply: bool
    completed: bool


def lookup(seed: bytes, messages: Sequence[Message]) -> ConversationLookup:
    """The digests under which a conversation that these messages continue may be stored."""
    digests = prefix_digests(seed, messages)
    replies = [digest for digest, message in zip(digests, messages, strict=True) if message.get("role") == "assistant"]
    whole = digests[-1] if digests else seed
    users = (message.get("role") == "user" and not is_volatile(message) for message in messages)
    root = next((digest for digest, is_user in zip(digests, users, strict=True) if is_user), whole)
    return ConversationLookup(replies, whole, root, bool(replies))


def choose_session(lookup: ConversationLookup, known: Sequence[KnownPrefix]) -> SessionId | None:
    """The session the request continues; None if it starts one.

    The deepest known reply in the request decides, of equals that of the newest turn: so an edited history continues
    its session as a branch. Where no reply is known, the request starts a session, unless it repeats a whole request
    whose newest reply never completed.
    """
    depth = {digest: place for place, digest in enumerate(lookup.replies)}
    reply = max(
        (prefix for prefix in known if prefix.is_reply and prefix.digest in depth),
        key=lambda prefix: (depth[prefix.digest], prefix.turn_id),
        default=None,
    )
    if reply is not None:
        return reply.session_id
    repeated = max(
        (prefix for prefix in known if not prefix.is_reply and prefix.digest == lookup.whole),
        key=lambda prefix: prefix.turn_id,
        default=None,
    )
    return repeated.session_id if repeated is not None and not repeated.completed else None
