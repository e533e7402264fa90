"""TCP connections to engines and judges, which end when the other machine is gone.

A machine that loses its power or network sends no reset, so a client would wait as long as the slowest answer may take:
half an hour for a chat. With keep-alive the kernel asks the other side's kernel, which answers at once even if the
server is busy.
"""

from __future__ import annotations

import socket

import aiohttp
from aiohttp import AddrInfoType

# When nothing came for as long, the kernel asks, and asks again.
ASK_SECONDS = 15
# The connection ends when no answer came for as long. A server that stands still and reads nothing of a long request
# counts, too: a minute of that is borne.
GONE_MILLISECONDS = 90_000
# Engines close a connection that was idle for 5 s (uvicorn's default). Using it again at that moment would look like a
# dead engine.
KEEP_SECONDS = 3.0


def connector(*, reused: bool = True) -> aiohttp.TCPConnector:
    """Connections without a limit on their number.

    Args:
        reused: an idle connection is used again for `KEEP_SECONDS`; False: each is used once.
    """
    return aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=KEEP_SECONDS if reused else None,
        force_close=not reused,
        socket_factory=_watched_socket,
    )


def _watched_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    watched = socket.socket(family=family, type=kind, proto=protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MILLISECONDS)
    return watched
