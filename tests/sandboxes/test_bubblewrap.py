"""What a sandbox can reach and use, tried from inside: it must not get out, nor take the machine down."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from clawloop.core.errors import SandboxFailed
from clawloop.sandboxes.answers import parse_answer
from clawloop.sandboxes.boxes import BoxResult, BoxTask, Limits, Sandboxes
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import Containers
from clawloop.sandboxes.folders import BoxFolders
from tests.sandboxes.conftest import WithImage

pytestmark = pytest.mark.slow
MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folders() -> BoxFolders:
    return BoxFolders()


@pytest.fixture
def bubblewrap(folders: BoxFolders) -> Bubblewrap:
    return Bubblewrap.find(folders)


@pytest.fixture(params=["bubblewrap", pytest.param("containers", marks=pytest.mark.containers)])
def sandboxes(request: pytest.FixtureRequest, folders: BoxFolders) -> Sandboxes:
    """What all sandboxes have to keep is tried in each kind."""
    if request.param == "bubblewrap":
        return Bubblewrap.find(folders)
    return WithImage(Containers.find(folders), request.getfixturevalue("image"))


async def python(sandboxes: Sandboxes, code: str, **fields: object) -> BoxResult:
    task = BoxTask("test", ("python3", "-I", "-c", code), fields.pop("seconds", 60.0), **fields)  # type: ignore[arg-type]
    return await sandboxes.run(task)


def files_of(result: BoxResult) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(result.artifact)) as archive:
        read = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read() for name, file in read.items() if file is not None}


async def test_a_command_sees_its_task_and_leaves_files(sandboxes: Sandboxes) -> None:
    code = "import os;os.mkdir('d');open('d/a','w').write(open('/task/x/in.txt').read()*2);os.symlink('/etc','l')"
    result = await python(sandboxes, code, files={"x/in.txt": b"ab"})
    assert (result.exit_code, result.problem) == (0, None)
    assert files_of(result) == {"d/a": b"abab"}  # no link


async def test_what_one_sandbox_left_is_unpacked_in_another(sandboxes: Sandboxes) -> None:
    first = await python(sandboxes, "open('a','w').write('left')")
    code = "import os;print(open('/artifact/a').read(), os.listdir('/work'))"
    second = await python(sandboxes, code, archive=first.artifact, unpack_to="/artifact")
    assert second.output == b"left []\n"


async def test_nothing_of_the_host_but_usr_is_there(bubblewrap: Bubblewrap, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    code = f"""
import os
etc = set(os.listdir('/etc')) if os.path.exists('/etc') else {{'alternatives'}}
top = sorted({{*os.listdir('/')}} - {{'etc'}})
print(top, etc, os.path.exists({str(secret)!r}), os.path.exists('/root'), os.listdir('/tmp'))
for path in ('/x', '/usr/x', '/dev/x', '/task/x', '/clawloop/x', '/clawloop/config.json'):
    try:
        open(path, 'a').close()
        print('wrote', path)
    except OSError:
        pass
print(len([name for name in os.listdir('/proc') if name.isdigit()]) < 6, os.environ.get('DATABASE_URL'))
"""
    lines = (await python(bubblewrap, code)).output.decode().splitlines()
    links = ["app", "solution", "tests"]  # to /work and /task
    own = ["artifact", "clawloop", "logs", "task", "tmp", "work"]
    top = sorted(["bin", "dev", "lib", "lib64", "proc", "usr", *own, *links])
    assert lines == [f"{top} { {'alternatives'} } False False []", "True None"]


async def test_no_network_but_the_gateways_socket(sandboxes: Sandboxes, open_folder: Path) -> None:
    """Services on the host's loopback and Unix sockets, as Temporal and PostgreSQL are; an address of the internet."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names = (f"\0clawloop-{uuid4().hex}", str(open_folder / "socket"))
    code = f"""
import socket
names = [(socket.AF_INET, ('127.0.0.1', port)) for port in ({port}, 8080)] + [(socket.AF_INET, ('1.1.1.1', 80))]
for family, name in [*names, *((socket.AF_UNIX, name) for name in {names!r})]:
    with socket.socket(family) as client:
        client.settimeout(2)
        try:
            client.connect(name)
            print('reached', name)
        except OSError:
            print('no')
"""
    with ExitStack() as stack:
        for name in names:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(name)
            listening.listen()
        (open_folder / "socket").chmod(0o777)
        async with server:
            assert (await python(sandboxes, code)).output == b"no\n" * 5


async def test_the_gateway_is_reached_and_streams(sandboxes: Sandboxes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readexactly(5)
        writer.write(asked[::-1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = """
import socket
with socket.create_connection(('127.0.0.1', 8080)) as gateway:
    gateway.sendall(b'hello')
    print(gateway.recv(100).decode())
"""
    async with server:
        result = await python(sandboxes, code, gateway=("127.0.0.1", port))
    assert result.output == b"olleh\n"


async def test_two_sandboxes_do_not_see_each_other(sandboxes: Sandboxes) -> None:
    """Both look around while both run: a service of the host lets them go on together."""
    names = ("sandbox-one", "sandbox-two")
    both = asyncio.Barrier(len(names))

    async def let_go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # before each looks, and before either ends
            await reader.readexactly(1)
            await both.wait()
            writer.write(b".")
            await writer.drain()
        writer.close()

    def code(name: str) -> str:
        return f"""
import os, socket
open('/tmp/{name}', 'w').close()
with socket.create_connection(('127.0.0.1', 8080)) as together:
    together.sendall(b'.')
    together.recv(1)
    print(os.listdir('/tmp'))
    for pid in sorted(name for name in os.listdir('/proc') if name.isdigit()):
        print(open(f'/proc/{{pid}}/cmdline').read())
    together.sendall(b'.')
    together.recv(1)
"""

    server = await asyncio.start_server(let_go_on, "127.0.0.1", 0)
    gateway = ("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        results = await asyncio.gather(*(python(sandboxes, code(name), gateway=gateway) for name in names))
    for own, other, result in zip(names, reversed(names), results, strict=True):
        seen = result.output.decode()
        assert seen.startswith(f"['{own}']\n")
        assert f"open('/tmp/{own}'" in seen  # its own command line: /proc shows what runs
        assert other not in seen


async def test_a_fork_bomb_meets_its_limit(sandboxes: Sandboxes) -> None:
    code = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError as error:
        print(error)
        break
"""
    result = await python(sandboxes, code, limits=Limits(processes=16))
    assert b"temporarily unavailable" in result.output
    assert result.exit_code == 0


async def test_memory_disk_and_output_are_limited(sandboxes: Sandboxes) -> None:
    code = f"""
try:
    bytearray({2048 * MIB})
except MemoryError:
    print('memory')
for folder in ('/work', '/tmp', '/logs', '/dev/shm'):
    try:
        for n in range(100):
            open(f'{{folder}}/{{n}}', 'wb').write(bytes({MIB}))
    except OSError as error:
        print(folder, error.strerror)
"""
    result = await python(sandboxes, code, limits=Limits(disk_bytes=4 * MIB))
    assert result.output.decode().splitlines() == [
        "memory",
        *(f"{folder} No space left on device" for folder in ("/work", "/tmp", "/logs", "/dev/shm")),
    ]
    flood = await python(sandboxes, "for _ in range(9000): print('y' * 1000)", limits=Limits(output_bytes=1000))
    assert (flood.exit_code, len(flood.output)) == (0, 1000)


async def test_what_is_left_is_limited(sandboxes: Sandboxes) -> None:
    result = await python(sandboxes, "open('a','wb').write(bytes(5000))", limits=Limits(artifact_bytes=4000))
    assert (result.exit_code, result.artifact, result.problem) == (0, b"", "it left more than 4000 bytes")


async def test_a_command_is_stopped_at_its_time_limit_with_all_it_started(sandboxes: Sandboxes) -> None:
    # A shell: the limit holds for its start, too, and a busy machine needs a second for Python's.
    command = ("sh", "-c", "setsid sleep 600 & echo began; sleep 600")
    result = await sandboxes.run(BoxTask("test", command, 3.0))
    assert (result.exit_code, result.output) == (None, b"began\n")


@pytest.mark.parametrize(
    "code",
    [
        "import os,signal;os.kill(-1, signal.SIGKILL)",
        "import os\nfor pid in range(2, 100):\n  try: pid == os.getpid() or os.kill(pid, 9)\n  except OSError: pass",
    ],
)
async def test_one_that_kills_what_watches_it_harms_itself_only(sandboxes: Sandboxes, code: str) -> None:
    result = await python(sandboxes, code)
    assert (result.exit_code, result.artifact) == (-1, b"")


async def test_an_archive_that_leads_out_of_its_folder_is_unpacked_in_part(sandboxes: Sandboxes) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("../work/out", "/work/absolute", "in/side"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/task"
        archive.addfile(link)
    code = "import os;print(os.listdir('/work'), os.listdir('/artifact'), os.listdir('/artifact/in'))"
    result = await python(sandboxes, code, archive=packed.getvalue(), unpack_to="/artifact")
    assert result.output == b"[] ['in'] ['side']\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json\n",
        b"[]\n",
        b'{"exit_code": 0, "output": 1000000000000, "artifact": 0}\nx',
        b'{"exit_code": 0, "output": 0, "artifact": -1}\n',
        b'{"exit_code": 0, "output": true, "artifact": 0}\nx',
        b'{"exit_code": 0, "output": 0, "artifact": 0}\nmore',
        b"[" * 100_000 + b"\n",
    ],
)
def test_an_answer_that_cannot_be_is_no_answer(answer: bytes) -> None:
    result = parse_answer(answer, b"", Limits())
    assert (result.exit_code, result.artifact) == (-1, b"")
    assert result.problem is not None


def test_a_sandbox_that_bubblewrap_did_not_make_is_no_fault_of_the_command() -> None:
    with pytest.raises(SandboxFailed, match="No space left"):
        parse_answer(b"", b"bwrap: Can't mkdir: No space left on device", Limits())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the sandboxes' users can enter, as the system's own for temporary files."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


async def test_nothing_is_left_of_a_sandbox_whose_caller_is_cancelled(open_folder: Path) -> None:
    own = BoxFolders(open_folder)
    sandboxes = Bubblewrap.find(own)
    running = asyncio.create_task(python(sandboxes, "import time;time.sleep(600)", seconds=600.0))
    while not list(open_folder.glob("*/box/config.json")):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert list(open_folder.iterdir()) == []


async def test_a_cancellation_while_bubblewrap_starts_leaves_nothing_and_does_not_hang(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = Bubblewrap.find(BoxFolders(open_folder))
    begin = asyncio.create_subprocess_exec
    begun = asyncio.Event()

    async def noted(*words: str, **options: Any) -> asyncio.subprocess.Process:
        begun.set()
        return await begin(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    for milliseconds in range(10):  # bubblewrap's first process has begun its second one, or not yet
        running = asyncio.create_task(python(sandboxes, "import time;time.sleep(600)", seconds=600.0))
        async with asyncio.timeout(60):
            await begun.wait()
            begun.clear()
            time.sleep(milliseconds / 1000)  # noqa: ASYNC251  asyncio itself must not go on
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert list(open_folder.iterdir()) == []
    wait_until(lambda: processes_with(str(open_folder)) == [])


def processes_with(word: str) -> list[psutil.Process]:
    """Processes whose command line holds the word."""
    return [process for process in psutil.process_iter(["cmdline"]) if word in " ".join(process.info["cmdline"] or ())]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_left_of_the_sandboxes_of_a_killed_worker(open_folder: Path) -> None:
    word = f"endless-{uuid4().hex}"
    worker = subprocess.Popen([sys.executable, "-m", "tests.sandboxes.endless", str(open_folder), word], cwd=ROOT)
    # The worker, bubblewrap inside and outside of the namespace do not name it, but the command does.
    wait_until(lambda: any("time.sleep" in " ".join(p.info["cmdline"]) for p in processes_with(word)))
    worker.kill()
    worker.wait()
    wait_until(lambda: not processes_with(word))
    assert BoxFolders(open_folder).sweep() == 1
    assert list(open_folder.iterdir()) == []


def test_folders_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    folders = BoxFolders(tmp_path)
    dead = tmp_path / "clawloop-box-dead"
    dead.mkdir()
    (dead / "lock").touch()
    other = tmp_path / "something-else"
    other.mkdir()
    with folders.new("living") as box:
        assert folders.sweep() == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [box.path.name, "something-else"]
