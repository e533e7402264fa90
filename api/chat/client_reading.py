"""Bounds on the time that a reply waits for its client to read it.

Meanwhile the request keeps its places on the engine. A client that reads a little now and then never hangs, so the
sum of the waits is bounded too.
"""

from __future__ import annotations

import time

from starlette.types import Message, Send

from api.errors import Problem

# A client that reads nothing for this long sleeps or hangs.
STALL_SECONDS = 60.0


class ClientReading:
    """
    Args:
        blocked_seconds: how long a reply may wait for its client in all.
    """

    def __init__(self, blocked_seconds: float) -> None:
        self._most = blocked_seconds
        self._blocked = 0.0
        self._since: float | None = None

    def timed(self, send: Send) -> Send:
        """`send`, counting how long it waits for the client to read."""

        async def timed(message: Message) -> None:
            self._since = time.monotonic()
            await send(message)
            self._blocked += time.monotonic() - self._since
            self._since = None

        return timed

    def stalls(self) -> bool:
        """The client has read nothing for `STALL_SECONDS`."""
        return self._waiting() > STALL_SECONDS

    def is_too_slow(self) -> bool:
        """The reply has waited for longer than it may."""
        return self._blocked + self._waiting() > self._most

    def too_slow(self) -> Problem:
        """The error for a client that reads too slowly."""
        message = (
            f"The reply was cut: it waited for {self._most:g} s in all for this client to read it, and kept "
            "others from the engine meanwhile. Read faster, or ask for less at once; an operator sets the bound with "
            "`CLAWLOOP_CHAT_BOUNDS__BLOCKED_SECONDS`."
        )
        return Problem(408, message, "client_too_slow")

    def _waiting(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since
