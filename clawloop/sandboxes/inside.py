"""Runs inside a sandbox, as its first program: limits, the way to the gateway, the command, and its artifact.

Standard library only, for whatever Python the sandbox has; nothing of Clawloop can be imported here. Everything it
writes comes from a process that the agent could have replaced, so its reader trusts none of it.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from typing import Any

HERE = "/clawloop"
# Where the tasks of others expect folders.
LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
MEMORY_SECONDS = 1.0
# `os.walk` and `os.makedirs` call themselves for each folder in a folder, of which a path has room for two thousand.
CALLS = 10_000


def main() -> None:
    if os.getpid() == 1:  # in a container; bubblewrap is the first process of its own
        become_init()
    sys.setrecursionlimit(CALLS)
    threading.Thread(target=end_with_worker, daemon=True).start()
    with open(f"{HERE}/config.json", encoding="utf-8") as file:  # noqa: PTH123
        config = json.load(file)
    for name, value in config["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for name, folder, only in config["archives"]:
        unpack(name, folder, only)
    for name in (config["folder"], *LOGS):
        os.makedirs(name, exist_ok=True)  # noqa: PTH103
    if config["port"]:
        threading.Thread(target=relay, args=(config["port"],), daemon=True).start()
    too_much: list[str] = []
    if config["memory_bytes"]:
        threading.Thread(target=watch_memory, args=(config["memory_bytes"], too_much), daemon=True).start()
    exit_code, output = run(config)
    if os.getpid() != 1:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # what the command left running; not this process, not the sandbox's init
    artifact, problem = pack(config["work"], config["artifact_bytes"])
    problem = problem or (too_much[0] if too_much else None)
    header = {"exit_code": exit_code, "output": len(output), "artifact": len(artifact), "problem": problem}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + output + artifact)
    sys.stdout.buffer.flush()


def become_init() -> None:
    """Continue in a child, while this process reaps all that end: zombies count towards the process limit."""
    child = os.fork()
    while child:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def end_with_worker() -> None:
    """End the sandbox when the worker closes its end of the pipe, or dies.

    Bubblewrap's own `--die-with-parent` comes too late for a worker that dies while the sandbox is being made.
    """
    while os.read(0, 1):
        pass
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os._exit(1)


def watch_memory(limit: int, too_much: list[str]) -> None:
    """Kill what the command runs once its processes have more memory of their own, all together, than this.

    Each process has a limit of its own, and sixty-four times that is more than a machine has.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    while not too_much:
        time.sleep(MEMORY_SECONDS)
        used = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
            with suppress(OSError, ValueError), open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123
                _, resident, shared, *_ = map(int, file.read().split())
                used += (resident - shared) * page
        if used > limit:
            too_much.append(f"its processes had more than {limit} bytes of memory")
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # not this process, not the sandbox's init


def unpack(name: str, folder: str, only: list[str] | None) -> None:
    """Unpack regular files only, below the folder: the archive is what an agent left.

    Args:
        only: files and folders; nothing else is unpacked. None: all.
    """
    folder = os.path.realpath(folder)
    wanted = None if only is None else [os.path.realpath(os.path.join(folder, path)) for path in only]  # noqa: PTH118
    with tarfile.open(f"{HERE}/{name}") as archive:
        for member in archive:
            path = os.path.normpath(os.path.join(folder, member.name))  # noqa: PTH118
            if wanted is not None and not any(path == one or path.startswith(one + "/") for one in wanted):
                continue
            file = archive.extractfile(member) if member.isreg() and path.startswith(folder + "/") else None
            if file is not None:
                os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
                with open(path, "wb") as target:  # noqa: PTH123
                    target.write(file.read())
                os.chmod(path, member.mode & 0o777 | 0o600)  # noqa: PTH101


def run(config: dict[str, Any]) -> tuple[int | None, bytes]:
    """The command's exit code, None if it was stopped at its time limit; and the end of its output."""
    try:
        process = subprocess.Popen(
            config["command"],
            cwd=config["folder"],
            env=config["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:  # e.g. its PATH, which a task may set, has no such program
        return 127, str(error).encode()[-config["output_bytes"] :]
    output = bytearray()
    assert process.stdout is not None
    reader = threading.Thread(target=drain, args=(process.stdout.fileno(), output, config["output_bytes"]), daemon=True)
    reader.start()
    try:
        exit_code = process.wait(config["seconds"])
    except subprocess.TimeoutExpired:
        exit_code = None
        os.killpg(process.pid, signal.SIGKILL)
    reader.join(1)  # a background process may hold the pipe open
    return exit_code, bytes(output[-config["output_bytes"] :])


def drain(descriptor: int, kept: bytearray, limit: int) -> None:
    while chunk := os.read(descriptor, 65536):
        kept += chunk
        if len(kept) > 2 * limit:
            del kept[:-limit]


def pack(work: str, limit: int) -> tuple[bytes, str | None]:
    """The regular files below the working folder as a tar archive, and why it is empty although there are some."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder, folders, names in os.walk(work):
            folders.sort()
            for name in folders:
                let_own_user(os.path.join(folder, name), 0o700)  # noqa: PTH118
            for name in sorted(names):
                path = os.path.join(folder, name)  # noqa: PTH118
                try:
                    pack_file(archive, path, os.path.relpath(path, work), limit)
                except OSError:
                    continue  # e.g. it vanished meanwhile, or its path is too long; the others are kept
                except (ValueError, tarfile.TarError) as error:
                    return b"", f"what it left cannot be read: {type(error).__name__}"
                # Headers count: that of a long name takes more than many a file.
                if packed.tell() > limit:
                    return b"", f"it left more than {limit} bytes"
    return packed.getvalue(), None


def pack_file(archive: tarfile.TarFile, path: str, name: str, limit: int) -> None:
    """Add a file, of a large one only so much that the archive is larger than the limit; links and others are not."""
    info = archive.gettarinfo(path, name)
    if info is None:  # a socket
        return
    if info.islnk():  # a further name of a file that is packed: links are left out, and this is none
        info.type, info.linkname = tarfile.REGTYPE, ""
    if not info.isreg():
        return
    # The same files give the same archive.
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    let_own_user(path, 0o400)
    with open(path, "rb") as file:  # noqa: PTH123
        content = file.read(limit + 1)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def let_own_user(path: str, mode: int) -> None:
    """Allow what the command forbade itself, e.g. to read a file that it made secret."""
    with suppress(OSError):
        found = os.lstat(path).st_mode
        if not stat.S_ISLNK(found) and found & mode != mode:
            os.chmod(path, stat.S_IMODE(found) | mode)  # noqa: PTH101


class Way:
    """One direction of a connection: what was read from its source and not sent yet."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target, self.held = source, target, b""


def relay(port: int) -> None:
    """Connect each client on the loopback port with the gateway's socket.

    In one thread: where the command has used up its processes, no other could be started, and an agent that forks would
    look like one whose gateway is away.
    """
    server = socket.create_server(("127.0.0.1", port))
    server.setblocking(False)
    ways: list[Way] = []
    while True:
        reading = [way.source for way in ways if not way.held]
        writing = [way.target for way in ways if way.held]
        readable, writable, _ = select.select([server, *reading], writing, [])
        for way in list(ways):
            try:
                if way.held and way.target in writable:
                    way.held = way.held[way.target.send(way.held) :]
                elif not way.held and way.source in readable:
                    way.held = way.source.recv(65536)
                    if not way.held:
                        ways.remove(way)
                        with suppress(OSError):
                            way.target.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                continue
            except OSError:  # one side is gone, which the other must learn
                way.source.close()
                way.target.close()
                ways = [other for other in ways if way.source not in (other.source, other.target)]
        if server in readable:
            ways += connect(server)


def connect(server: socket.socket) -> list[Way]:
    """Both directions of a new connection; none if there can be no further one now."""
    try:
        client, _ = server.accept()
        gateway = socket.socket(socket.AF_UNIX)
        gateway.connect(f"{HERE}/gateway.sock")
    except OSError:
        time.sleep(0.1)  # too many are open, and the same client would be found at once
        return []
    for end in (client, gateway):
        end.setblocking(False)
    return [Way(client, gateway), Way(gateway, client)]


if __name__ == "__main__":
    main()
