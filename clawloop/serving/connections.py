"""TCP connections to engines, judges and other servers, which end when the other machine is gone.

A machine that loses its power or network sends no reset, and whoever waits for its answer waits as long as the slowest
answer may take: half an hour for a chat. The kernel asks the other side instead, which also a busy server's kernel
answers at once.
"""

from __future__ import annotations

import socket

import aiohttp
from aiohttp import AddrInfoType

# An idle connection is asked after the first, then at the second, this many times: its end is noticed after 30 s.
IDLE_SECONDS = 15
PROBE_SECONDS = 5
PROBES = 3
# As long for data that was sent and that the other side's kernel never acknowledged.
UNACKNOWLEDGED_MILLISECONDS = 30_000


def connector(keep_seconds: float) -> aiohttp.TCPConnector:
    """Connections without a limit on their number.

    Args:
        keep_seconds: how long an idle connection may be used again; 0: each is used once.
    """
    if keep_seconds == 0:
        return aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket)
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_seconds, socket_factory=_watched_socket)


def _watched_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    watched = socket.socket(family=family, type=kind, proto=protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
    return watched
