"""Attacks from inside a sandbox on what really runs beside it: PostgreSQL, Temporal, their data, another sandbox.

The same program runs on the host first, where it reaches all of it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import psycopg
import pytest

from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.sandboxes.boxes import BoxTask, Sandboxes
from tests.sandboxes.test_bubblewrap import folders, processes_with, python, sandboxes

__all__ = ["folders", "sandboxes"]
pytestmark = pytest.mark.slow

_ATTACK = """
import json, os, socket
targets, reached = json.loads({targets!r}), []
for host, port in targets["ports"]:
    try:
        socket.create_connection((host, port), 10).close()
        reached.append([host, port])
    except OSError:
        pass
for path in targets["sockets"]:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
            reached.append(path)
        except OSError:
            pass
for path in targets["files"]:
    if os.path.lexists(path):
        reached.append(path)
for pid in targets["processes"]:
    try:
        os.kill(pid, 0)
        reached.append(pid)
    except ProcessLookupError:
        pass
    except PermissionError:
        reached.append(pid)
print(json.dumps(reached))
"""


@dataclass(frozen=True, slots=True)
class Targets:
    """
    Args:
        ports: hosts and ports; files: of which it is asked whether they are there; processes: ids on the host.
    """

    ports: Sequence[tuple[str, int]] = ()
    sockets: Sequence[str] = ()
    files: Sequence[str] = ()
    processes: Sequence[int] = ()

    @property
    def attack(self) -> str:
        """A program that prints which of them it reaches."""
        return _ATTACK.format(targets=json.dumps(asdict(self)))

    def reached_on_the_host(self) -> object:
        done = subprocess.run([sys.executable, "-I", "-c", self.attack], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    @property
    def all(self) -> list[object]:
        return [*([host, port] for host, port in self.ports), *self.sockets, *self.files, *self.processes]


async def reached_by(sandboxes: Sandboxes, targets: Targets) -> object:
    result = await python(sandboxes, targets.attack)
    assert result.exit_code == 0, result
    return json.loads(result.output)


def listening() -> set[tuple[str, int]]:
    """Where any service of this machine listens."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    found = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr]
    return {(here.get(address.ip, address.ip), address.port) for address in found}


async def test_postgresql_and_temporal_their_data_and_processes_are_out_of_reach(
    sandboxes: Sandboxes, postgres_server: EmbeddedPostgres, temporal_address: str
) -> None:
    host, _, port = temporal_address.rpartition(":")
    database = urlsplit(postgres_server.url)
    addresses = [("127.0.0.1", database.port or 0), (host, int(port))]
    temporal = processes_with(f"--port {port} ")  # with what guards it
    words: list[str] = temporal[0].info["cmdline"]
    rows = words[words.index("--db-filename") + 1]
    with psycopg.connect(postgres_server.url) as connection:
        cluster = Path(f"/proc/{connection.info.backend_pid}/cwd").resolve()
        running = [connection.info.backend_pid, *(process.pid for process in temporal)]
        files = [str(cluster / "PG_VERSION"), str(cluster.parent / "password"), rows]
        targets = Targets(ports=addresses, files=files, processes=running)
        assert await asyncio.to_thread(targets.reached_on_the_host) == targets.all
        others = sorted(listening() - set(addresses))
        everything = Targets([*addresses, *others], (), files, running)
        assert await reached_by(sandboxes, everything) == []


async def test_no_route_leads_out(sandboxes: Sandboxes) -> None:
    """Neither to the internet nor to the machine's own network."""
    code = """
import os
routes = [line.split() for line in open("/proc/net/route").readlines()[1:]]
if os.path.exists("/proc/net/ipv6_route"):
    routes += [line.split() for line in open("/proc/net/ipv6_route") if line.split()[-1] != "lo"]
print(routes)
"""
    assert (await python(sandboxes, code)).output == b"[]\n"


@asynccontextmanager
async def another(sandboxes: Sandboxes, word: str) -> AsyncIterator[None]:
    """A sandbox that runs meanwhile, with a way to the gateway."""
    began = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            began.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    code = f"""
import socket, time
open("/tmp/{word}", "w").close(); open("/work/{word}", "w").close()
with socket.create_connection(("127.0.0.1", 8080)) as gateway:
    gateway.sendall(b".")
    time.sleep(600)
"""
    box = BoxTask(word, ("python3", "-I", "-c", code), 600.0, gateway=server.sockets[0].getsockname())
    async with server:
        running = asyncio.create_task(sandboxes.run(box))
        waiting = asyncio.create_task(began.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            assert began.is_set()
            yield
        finally:
            for task in (waiting, running):
                task.cancel()
            await asyncio.gather(waiting, running, return_exceptions=True)


async def test_another_sandbox_its_files_processes_and_socket_are_out_of_reach(sandboxes: Sandboxes) -> None:
    word = f"other-{uuid4().hex[:12]}"
    async with another(sandboxes, word):
        [folder] = Path(tempfile.gettempdir()).glob(f"clawloop-box-{word}-*")
        pids = [process.pid for process in await asyncio.to_thread(processes_with, word)]
        assert pids
        files = [f"{folder}/{inner}" for inner in ("", "box/config.json", "task", "box/gateway.sock")]
        through_proc = [f"/proc/{pid}/root" for pid in pids]
        on_the_host = Targets(sockets=[f"{folder}/box/gateway.sock"], files=[*files, *through_proc], processes=pids)
        assert await asyncio.to_thread(on_the_host.reached_on_the_host) == on_the_host.all
        inside = [f"/tmp/{word}", f"/work/{word}"]
        attacked = Targets((), on_the_host.sockets, [*on_the_host.files, *inside], pids)
        assert await reached_by(sandboxes, attacked) == []
        names = "print(open('/proc/self/mountinfo').read(), open('/proc/net/unix').read())"
        seen = (await python(sandboxes, names)).output.decode()
        assert "/work" in seen
        assert word not in seen
