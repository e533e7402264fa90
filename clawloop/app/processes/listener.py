"""A listening socket that a supervisor holds and hands on to gateways.

Several gateways may share it. It outlives each of them: while one restarts, the others accept, and while all restart,
connections wait in the kernel's queue. So none is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from clawloop.core.errors import SetupError

# uvicorn's own value; the kernel lowers it to net.core.somaxconn, which is 4096.
QUEUED_CONNECTIONS = 2048
# systemd passes sockets from this descriptor on.
_FIRST_SYSTEMD_FD = 3


def inherited_socket(descriptor: int, option: str) -> socket.socket:
    """The socket with this file descriptor.

    Args:
        option: where the descriptor was given, for error messages.

    Raises:
        SetupError: it is no stream socket.
    """
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError as error:
        raise SetupError(f"{option}: file descriptor {descriptor} is not a socket: {error.strerror}") from error
    if inherited.type != socket.SOCK_STREAM:
        inherited.detach()
        raise SetupError(f"{option}: file descriptor {descriptor} is not a TCP or Unix stream socket")
    return inherited


def systemd_socket(environment: Mapping[str, str]) -> socket.socket | None:
    """The socket of systemd's socket activation (LISTEN_FDS); None without one.

    Raises:
        SetupError: there are several.
    """
    count = environment.get("LISTEN_FDS", "0")
    if environment.get("LISTEN_PID") != str(os.getpid()) or count == "0":
        return None
    if count != "1":
        raise SetupError(f"LISTEN_FDS={count}: a gateway takes one socket; give its socket unit one ListenStream")
    return inherited_socket(_FIRST_SYSTEMD_FD, "LISTEN_FDS")
