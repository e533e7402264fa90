"""Finds the session a request continues by its messages, when nothing names the session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.turns.canonical import History
from clawloop.core.turns.places import is_said

# Of the turns that were asked the same, the newest ones are looked at, this many. SDKs send a request three times until
# it is answered, and two replies with an end are enough to know that they cannot be told apart.
ASKED_ALIKE = 4


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


def choose_session(history: History, known: Sequence[KnownPrefix]) -> SessionId | None:
    """The session the request continues; None if it starts one.

    The deepest known reply in the request decides, of equals that of the newest turn: so an edited history continues
    its session as a branch. Where no reply is known, the request starts a session, unless it repeats a whole request
    whose newest reply never completed.
    """
    depth = {digest: place for place, digest in enumerate(history.replies)}
    reply = max(
        (prefix for prefix in known if prefix.is_reply and prefix.digest in depth),
        key=lambda prefix: (depth[prefix.digest], prefix.turn_id),
        default=None,
    )
    if reply is not None:
        return reply.session_id
    repeated = max(
        (prefix for prefix in known if not prefix.is_reply and prefix.digest == history.whole),
        key=lambda prefix: prefix.turn_id,
        default=None,
    )
    return repeated.session_id if repeated is not None and not repeated.completed else None


def choose_session_by_place(
    history: History, asked: Mapping[bytes, Sequence[tuple[SessionId, Message, bool]]]
) -> SessionId | None:
    """The session of the deepest reply that stands, in other words, right after what one turn alone was asked.

    Args:
        asked: by the digest of what they were asked, the turns of the key that replied: their session, their reply, and
            whether it has an end. At least `ASKED_ALIKE` of them, where there are more.
    """
    for place in reversed(history.alone):
        turns = asked.get(history.before(place), ())
        # A request that was cut off and sent again has a reply without an end beside the one that the client got.
        turns = [turn for turn in turns if turn[2]] or turns
        if len(turns) == 1:
            session, reply, _ = turns[0]
            if is_said(reply, history.messages[place:]):
                return session
    return None
