"""A gateway's inherited socket: which descriptors it takes, and what it says of others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from clawloop.app.processes.listener import inherited_socket, systemd_socket
from clawloop.core.errors import SetupError


def test_a_stream_socket_is_taken_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        with inherited_socket(os.dup(held.fileno()), "--fd") as inherited:
            assert inherited.getsockname() == held.getsockname()


def test_a_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        with pytest.raises(SetupError, match=rf"--fd: file descriptor {file.fileno()} is not a socket"):
            inherited_socket(file.fileno(), "--fd")


def test_a_datagram_socket_is_refused() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(SetupError, match="not a TCP or Unix stream socket"):
            inherited_socket(datagrams.fileno(), "--fd")


def test_systemds_variables_count_only_for_this_process() -> None:
    assert systemd_socket({}) is None
    assert systemd_socket({"LISTEN_FDS": "1", "LISTEN_PID": "1"}) is None
    with pytest.raises(SetupError, match="LISTEN_FDS=2: a gateway takes one socket"):
        systemd_socket({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())})
