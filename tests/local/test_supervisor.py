"""The supervisor restarts parts, reports their ends, and leaves no descendant of them. Real child processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path

import psutil
import pytest
import uvicorn
from rich.console import Console
from starlette.types import Receive, Scope, Send

import api.http_protocol
from api.http_protocol import BoundedHttpProtocol
from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment, gateways
from clawloop.app.local.services import temporal_server
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.local.services.vllm import EngineOptions, ModelFacts
from clawloop.app.local.supervision import guard
from clawloop.app.local.supervision.supervisor import (
    GUARD_SECONDS,
    Launch,
    LineBoard,
    Part,
    PartLog,
    PartState,
    PartStatus,
    RestartPolicy,
    Supervisor,
    TableBoard,
    describe,
    guarded,
    open_board,
)
from clawloop.app.processes import draining_server
from clawloop.app.processes.draining_server import CUT_SECONDS, DrainingServer
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from tests.local.status_recorder import StatusRecorder
from tests.processes import alive

# The supervisor restarts parts, reports why they ended, and stops them in order. Real child processes.

QUICK = RestartPolicy(
    first_delay=timedelta(seconds=0.05),
    longest_delay=timedelta(seconds=0.2),
    reset_after=timedelta(seconds=0.5),
    check_interval=timedelta(seconds=0.05),
    unresponsive_after=timedelta(seconds=0.3),
)
SLEEPS = "import time; time.sleep(600)"


async def always() -> bool:
    return True


async def never() -> bool:
    return False


def part(name: str, program: str, is_ready: Callable[[], Awaitable[bool]] = always, **more: timedelta) -> Part:
    launch = Launch((sys.executable, "-c", program), {"PATH": os.defpath})
    bounds: dict[str, timedelta] = {"stop_within": timedelta(seconds=3), **more}
    return replace(Part(name, f"{name}:1", lambda: launch, is_ready), **bounds)  # type: ignore[arg-type]


@asynccontextmanager
async def supervising(folder: Path, policy: RestartPolicy = QUICK) -> AsyncIterator[tuple[Supervisor, StatusRecorder]]:
    statuses = StatusRecorder()
    supervisor = Supervisor(folder, statuses, policy)
    others = set(psutil.Process().children(recursive=True))  # session-wide fixtures have children too
    try:
        yield supervisor, statuses
    finally:
        await supervisor.stop([{status.name for status in statuses.history}])
    assert _started_beside(others) == set()


async def test_a_part_that_exits_is_restarted_and_the_reason_is_reported(tmp_path: Path) -> None:
    # It ends when the test says so, and not before it was seen ready.
    program = f"""
import pathlib, sys, time
while not (end := pathlib.Path({str(tmp_path / "end")!r})).exists():
    time.sleep(0.02)
end.unlink()
print("ValueError: no more")
print("bye")
sys.exit(7)
"""
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("worker", program))
        await supervisor.ready("worker")
        (tmp_path / "end").touch()
        waiting = await statuses.until("worker", PartState.WAITING)
        assert waiting.detail == "ended with exit code 7: ValueError: no more; restart in 0.05 s"
        assert waiting.restarts == 1
        ready_again = await statuses.until("worker", PartState.READY, times=2)
        assert ready_again.restarts == 1
    assert statuses.states("worker")[-1] is PartState.STOPPED
    assert (tmp_path / "worker.log").read_text().count("--- started") >= 2


async def test_a_part_that_is_killed_is_restarted_and_the_signal_is_named(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("worker", "print('all is well'); " + SLEEPS))
        await supervisor.ready("worker")
        async with asyncio.timeout(30):
            while (running := _guarded_process("all is well")) is None:
                await asyncio.sleep(0.02)
        running.send_signal(signal.SIGSEGV)
        waiting = await statuses.until("worker", PartState.WAITING)
        assert waiting.detail == "was ended by SIGSEGV; restart in 0.05 s"
        await statuses.until("worker", PartState.READY, times=2)


def _started_beside(others: set[psutil.Process]) -> set[psutil.Process]:
    """Processes below this one that are neither among `others` nor below one of them, as PostgreSQL's are."""
    found = set()
    for process in set(psutil.Process().children(recursive=True)) - others:
        with suppress(psutil.NoSuchProcess):
            if others.isdisjoint(process.parents()):
                found.add(process)
    return found


def _guarded_process(marker: str) -> psutil.Process | None:
    """The guarded child of this process whose command contains `marker`; session-wide fixtures have others."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if marker in command and "clawloop.app.local.supervision.guard" not in command:
                return process
    return None


async def test_a_part_that_never_gets_ready_fails_after_three_attempts(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("broken", "print('bind: address in use'); raise SystemExit(2)", never))
        with pytest.raises(SetupError) as raised:
            await supervisor.ready("broken")
        assert str(raised.value) == (
            "broken failed to start 3 times: ended with exit code 2: bind: address in use"
            f" (log: {tmp_path / 'broken.log'})"
        )
        with pytest.raises(SetupError):
            await supervisor.first_failure()
    assert statuses.states("broken").count(PartState.STARTING) == 3
    assert statuses.states("broken")[-1] is PartState.FAILED


async def test_a_part_that_cannot_be_prepared_fails_at_the_first_attempt(tmp_path: Path) -> None:
    def refuse() -> Launch:
        raise SetupError("port 5432 is in use")

    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(Part("database", "", refuse, always))
        with pytest.raises(SetupError, match="port 5432 is in use"):
            await supervisor.ready("database")
    assert statuses.states("database") == [PartState.STARTING, PartState.FAILED]


async def test_waiting_for_a_slow_part_ends_when_another_part_fails(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("slow", SLEEPS, never))
        supervisor.start(part("broken", "raise SystemExit(1)", never))
        with pytest.raises(SetupError, match="broken failed to start"):
            await supervisor.ready("slow")


async def test_a_part_that_is_not_ready_in_time_is_restarted(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("slow", SLEEPS, never, start_within=timedelta(seconds=0.3)))
        waiting = await statuses.until("slow", PartState.WAITING)
        assert waiting.detail.startswith("not ready after 0.3 s")


async def test_a_part_that_stops_answering_is_restarted(tmp_path: Path) -> None:
    answers = iter([True, True])

    async def at_first() -> bool:
        return next(answers, False)

    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("hung", SLEEPS, at_first))
        waiting = await statuses.until("hung", PartState.WAITING)
        assert waiting.detail == "no answer for 0.3 s; restart in 0.05 s"
        assert statuses.states("hung")[:3] == [PartState.STARTING, PartState.READY, PartState.WAITING]


async def test_progress_is_read_from_the_log(tmp_path: Path) -> None:
    program = "import time; print('noise', flush=True); print('loading 7', flush=True); time.sleep(600)"

    def progress(line: str) -> str | None:
        return line.replace("loading", "loads") if line.startswith("loading") else None

    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(replace(part("engine", program, never), progress=progress))
        assert (await statuses.until("engine", PartState.STARTING, times=2)).detail == "loads 7"


async def test_parts_stop_in_the_given_order(tmp_path: Path) -> None:
    record = tmp_path / "ends"
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.1); open({0!r}, 'a').write(sys.argv[0] + {1!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('armed', flush=True)\ntime.sleep(600)"
    )
    async with supervising(tmp_path) as (supervisor, _):
        for name in ("first", "second", "third"):

            async def armed(log: Path = tmp_path / f"{name}.log") -> bool:
                return log.exists() and "armed" in log.read_text()

            supervisor.start(part(name, program.format(str(record), f" {name}\n"), armed))
            await supervisor.ready(name)
        await supervisor.stop([["third"], ["second"], ["first"], ["never started"]])
    assert record.read_text() == "-c third\n-c second\n-c first\n"


async def test_a_part_that_ignores_sigterm_is_killed_after_stop_within(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('armed', flush=True);" + SLEEPS

    async def armed() -> bool:
        return "armed" in (tmp_path / "stubborn.log").read_text()

    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("stubborn", program, armed, stop_within=timedelta(seconds=0.4)))
        await supervisor.ready("stubborn")
        stopped_at = time.monotonic()
        await supervisor.stop([["stubborn"]])
        assert 0.4 <= time.monotonic() - stopped_at < 20


async def test_kill_stopping_does_not_wait_for_stop_within(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('armed', flush=True);" + SLEEPS

    async def armed() -> bool:
        return "armed" in (tmp_path / "stubborn.log").read_text()

    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("stubborn", program, armed, stop_within=timedelta(minutes=5)))
        await supervisor.ready("stubborn")
        stopping = asyncio.create_task(supervisor.stop([["stubborn"]]))
        await statuses.until("stubborn", PartState.STOPPING)
        async with asyncio.timeout(30):  # stop_within is 5 min
            while not stopping.done():
                await asyncio.sleep(0.2)
                supervisor.kill_stopping()  # repeated: its guard may have received two signals as one
        await stopping


async def test_a_part_stopped_between_two_runs_is_not_restarted(tmp_path: Path) -> None:
    async with supervising(
        tmp_path, replace(QUICK, first_delay=timedelta(minutes=5), longest_delay=timedelta(minutes=5))
    ) as (
        supervisor,
        statuses,
    ):
        supervisor.start(part("worker", "raise SystemExit(1)", never))
        await statuses.until("worker", PartState.WAITING)
        async with asyncio.timeout(30):  # the delay is 5 min
            await supervisor.stop([["worker"]])
    assert statuses.states("worker") == [PartState.STARTING, PartState.WAITING, PartState.STOPPED]


async def test_a_part_stopped_during_its_start_leaves_no_process(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("worker", SLEEPS, never))
        await statuses.until("worker", PartState.STARTING)  # nothing has been spawned yet
        async with asyncio.timeout(30):
            await supervisor.stop([["worker"]])
    assert statuses.states("worker")[-1] is PartState.STOPPED


def test_restart_delays_double_up_to_half_a_minute() -> None:
    policy = RestartPolicy()
    assert [policy.delay(n).total_seconds() for n in (1, 2, 3, 6, 7, 8, 10_000)] == [0.5, 1, 2, 16, 30, 30, 30]


def test_a_gateway_that_dies_again_and_again_is_back_within_two_seconds(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        policies = [gateway.restart for gateway in gateways(deployment, listener, 2, {})]
    assert len(policies) == 2
    for policy in policies:
        assert policy is not None  # the supervisor's waits up to 30 s
        assert [policy.delay(n).total_seconds() for n in (1, 2, 5, 6, 10_000)] == [0.1, 0.2, 1.6, 2, 2]
        assert policy.reset_after == timedelta(seconds=10)


async def test_a_long_run_resets_the_restart_delay(tmp_path: Path) -> None:
    program = f"""
import pathlib, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
n = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (n + 1))
time.sleep(2.5 if n == 2 else 0.15)
"""
    policy = replace(QUICK, reset_after=timedelta(seconds=2))
    async with supervising(tmp_path, policy) as (supervisor, statuses):
        supervisor.start(part("worker", program))
        await statuses.until("worker", PartState.WAITING, times=4)
    runs = [s for s in statuses.history if s.state in (PartState.STARTING, PartState.WAITING)][:8]
    failures, expected = 0, list[str]()
    for started, ended in zip(runs[::2], runs[1::2], strict=True):
        # By the clock: a busy machine may make a short run a long one.
        failures = 1 if ended.since - started.since >= policy.reset_after else failures + 1
        expected.append(f"{policy.delay(failures).total_seconds():g} s")
    assert [run.detail.rsplit("in ", 1)[1] for run in runs[1::2]] == expected
    assert expected[2] == "0.05 s"  # the third run is long everywhere


async def test_a_log_of_a_running_part_is_rotated(tmp_path: Path) -> None:
    flood = "import time; print('x' * (11 * 2**20), flush=True); print('then', flush=True); time.sleep(60)"
    log = tmp_path / "flood.log"
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("flood", flood))
        await supervisor.ready("flood")
        async with asyncio.timeout(30):
            while not log.with_name("flood.log.1").exists() or log.stat().st_size > 100:
                await asyncio.sleep(0.02)


def test_a_log_is_bounded_while_its_part_writes(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "vllm.log", max_bytes=100)
    with log.open_for_run() as file:
        for number in range(50):
            file.write(b"line %d\n" % number)
            file.flush()
            log.rotate_if_large()
            assert log.path.stat().st_size <= 110
            assert list(log.new_lines()) in ([], [f"line {number}"])
        file.write(b"ValueError: the end\n")
        file.flush()
    assert log.path.with_name("vllm.log.1").stat().st_size <= 110
    assert b"\0" not in log.path.read_bytes()
    assert log.last_message() == "ValueError: the end"


def test_a_full_disk_costs_lines_of_a_log_and_nothing_else(tmp_path: Path) -> None:
    log, older = PartLog(tmp_path / "vllm.log", max_bytes=100), tmp_path / "vllm.log.1"
    older.symlink_to("/dev/full")
    with log.open_for_run() as file:
        file.write(b"x" * 200)
        file.flush()
        log.rotate_if_large()
        file.write(b"ValueError: the end\n")
    assert not older.is_symlink()  # what was copied takes no room that turns need
    assert log.path.read_bytes() == b"ValueError: the end\n"

    full = PartLog(tmp_path / "full.log")
    full.path.symlink_to("/dev/full")
    full.open_for_run().close()


async def test_a_part_that_ends_on_a_full_disk_is_restarted_once_there_is_room(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "import time; time.sleep(0.1)"), {"PATH": os.defpath})
    starts = 0

    def prepare() -> Launch:
        nonlocal starts
        starts += 1
        if 1 < starts < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return launch

    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(replace(part("worker", ""), prepare=prepare))
        async with asyncio.timeout(30):
            await statuses.until("worker", PartState.READY, times=2)
    assert "No space left on device" in " ".join(s.detail for s in statuses.history if s.state is PartState.WAITING)
    assert starts >= 6


def test_a_log_that_is_too_large_is_moved_at_a_start(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "logs" / "vllm.log", max_bytes=100)
    for text in (b"first " * 30, b"second " * 30, b"third"):
        with log.open_for_run() as file:
            file.write(text)
    assert b"third" in log.path.read_bytes()
    assert b"second" not in log.path.read_bytes()
    assert b"second" in log.path.with_name("vllm.log.1").read_bytes()
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["vllm.log", "vllm.log.1"]


def test_the_last_message_is_of_this_run_and_prefers_an_error(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "x.log")
    with log.open_for_run() as file:
        file.write(b"RuntimeError: of an earlier run\n")
    with log.open_for_run() as file:
        file.write("\x1b[31mall\x1b[0m well \xff\n".encode("latin-1"))
    assert log.last_message() == "all well \ufffd"
    assert log.last_message(any_line=False) == ""
    with log.open_for_run() as file:
        file.write(b"OSError: [Errno 98] in use\nmore talk\n\n")
    assert log.last_message(any_line=False) == "OSError: [Errno 98] in use"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"message": "started"}, "started"),
        (
            {"message": "Traceback (most recent call last):\n  a\nOSError: in use\n", "exc_info": None},
            "OSError: in use",
        ),
        ({"message": "it ended", "exc_info": "Traceback:\nOSError: in use"}, "OSError: in use"),
        ({"level": "INFO"}, '{"level": "INFO"}'),
        (["message"], '["message"]'),
    ],
)
def test_of_a_json_log_line_its_message_is_told(tmp_path: Path, record: object, told: str) -> None:
    log = PartLog(tmp_path / "x.log")
    with log.open_for_run() as file:
        file.write(json.dumps(record).encode() + b"\n")
    assert log.last_message() == told


# The guard: no descendant of a part outlives the part, a stop, or a killed supervisor.

GRACE = timedelta(seconds=30)
# A parent with a child and, in a session of its own, a grandchild; each writes its pid.
FAMILY = """
import os, subprocess, sys, time
folder = sys.argv[1]
grandchild = (
    "import os, time, pathlib; os.setsid();"
    f"pathlib.Path({folder!r}, 'grandchild').write_text(str(os.getpid())); time.sleep(600)"
)
child = (
    "import os, pathlib, subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]);"
    f"pathlib.Path({folder!r}, 'child').write_text(str(os.getpid())); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", child])
open(os.path.join(folder, "parent"), "w").write(str(os.getpid()))
"""
STAYS = FAMILY + "time.sleep(600)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYS
ENDS = FAMILY + "while not os.path.exists(os.path.join(folder, 'go')):\n    time.sleep(0.02)\nos.kill(os.getpid(), 9)"


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def family(folder: Path) -> list[psutil.Process]:
    names = ("parent", "child", "grandchild")
    until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in names))
    return [psutil.Process(int((folder / name).read_text())) for name in names]


@pytest.fixture
def run_guarded(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str, grace: timedelta = GRACE) -> subprocess.Popen[bytes]:
        command = guarded((sys.executable, "-c", program, str(tmp_path)), signal.SIGTERM, grace)
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_sigterm_to_the_guard_ends_all_descendants(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(STAYS)
    members = family(tmp_path)
    guard.terminate()
    assert guard.wait(30) == -signal.SIGTERM
    assert alive(members) == []


def test_descendants_that_ignore_sigterm_are_killed_after_the_grace_period(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(IGNORES, grace=timedelta(seconds=0.5))
    members = family(tmp_path)
    terminated_at = time.monotonic()
    guard.terminate()
    assert guard.wait(30) == -signal.SIGKILL
    assert time.monotonic() - terminated_at >= 0.5
    assert alive(members) == []


def test_a_second_sigterm_skips_the_grace_period(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(IGNORES, grace=timedelta(minutes=5))
    members = family(tmp_path)
    guard.terminate()
    deadline = time.monotonic() + 30
    while guard.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.3)
        guard.terminate()  # repeated: on a busy machine two signals may arrive as one
    assert guard.wait(30) == -signal.SIGKILL
    assert alive(members) == []


def test_descendants_of_a_killed_part_are_ended(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(ENDS)
    members = family(tmp_path)
    (tmp_path / "go").touch()
    assert guard.wait(30) == -signal.SIGKILL
    assert alive(members) == []


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_guard_exits_with_the_parts_code(run_guarded: Callable[..., subprocess.Popen[bytes]], code: int) -> None:
    assert run_guarded(f"raise SystemExit({code})").wait(30) == code


def test_a_program_that_cannot_be_run_is_reported() -> None:
    command = guarded(("/nowhere/program",), signal.SIGTERM, GRACE)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 127
    assert ended.stderr == "cannot run /nowhere/program: No such file or directory\n"


def test_killing_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    starter = f"""
import asyncio, signal, sys
from datetime import timedelta
from pathlib import Path
from clawloop.app.local.supervision.supervisor import Launch, Part
from clawloop.app.local.supervision.supervisor import Supervisor

async def main():
    async def ready():
        return True
    launch = Launch((sys.executable, "-c", {STAYS!r}, {str(tmp_path)!r}), {{}})
    supervisor = Supervisor(Path({str(tmp_path)!r}, "logs"), lambda status: None)
    supervisor.start(Part("family", "", lambda: launch, ready, stop_within=timedelta(seconds=2)))
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", starter], env=dict(os.environ))
    members = family(tmp_path)
    guards = psutil.Process(parent.pid).children()
    assert guards
    parent.kill()
    parent.wait()
    until(lambda: not alive([*members, *guards]), seconds=30)


# The promise of `clawloop up`: it stops within 20 s.

PROMISED = timedelta(seconds=20)


def bound(started: Sequence[Part]) -> timedelta:
    """The longest that `Supervisor.stop` waits: the parts of a group stop at once, the groups one after another."""
    within = {part.name: part.stop_within for part in started}
    groups = [group for group in parts.stop_order(within) if group]
    return sum((max(within[name] for name in group) for group in groups), timedelta()) + timedelta(
        seconds=GUARD_SECONDS * len(groups)
    )


def test_the_bounds_of_all_parts_add_up_to_less_than_promised(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path,
        "postgresql://x",
        "x:1",
        engines=("http://127.0.0.1:1", "http://127.0.0.1:2"),
        base_model="tiny",
        aliases=(),
        keys={},
        local_engines=("http://127.0.0.1:1", "http://127.0.0.1:2"),
        sandboxed="http://127.0.0.1:3",
    )
    model = ModelFacts(tmp_path, "tiny", ChatFormat(Thinking.NEVER, None, None))
    engines = [parts.ENGINE, parts.numbered(parts.ENGINE, 1, 2), parts.JUDGE_ENGINE]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started = [
            parts.postgres(EmbeddedPostgres(tmp_path / "postgres", port=1)),
            parts.temporal(tmp_path, temporal_server.Ports(1, 2, 3), {}),
            *(parts.vllm(name, model, EngineOptions(1, ()), "CPU", {}) for name in engines),
            *parts.gateways(deployment, listener, 2, {}),
            *parts.workers(deployment, {}),
            parts.trainer(tmp_path, deployment, {}),
        ]
    assert {parts.AGENT + "-0", parts.AGENT + "-1", parts.ENVIRONMENT, parts.TRAINER} <= {part.name for part in started}
    assert bound(started) < PROMISED


def test_what_writes_stops_before_what_it_writes_to() -> None:
    order = parts.stop_order(["postgres", "temporal", "vllm-judge", "vllm-0", "gateway", "trainer", "judge"])
    assert order == [["gateway", "trainer", "judge"], ["temporal", "vllm-judge", "vllm-0"], ["postgres"]]


def test_a_guard_has_ended_orphans_before_it_is_killed_itself() -> None:
    """Else what a part leaves behind would outlive both."""
    assert guard.ORPHAN_SECONDS < GUARD_SECONDS


# The status board: dated lines in a file, a table on a terminal.


def status(state: PartState, detail: str = "", restarts: int = 0) -> PartStatus:
    since = datetime.now().astimezone() - timedelta(minutes=3)
    return PartStatus("vllm", state, "http://127.0.0.1:8100", detail, since, restarts)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (status(PartState.STARTING, "loading weights"), "vllm starting: loading weights"),
        (status(PartState.READY), "vllm ready at http://127.0.0.1:8100"),
        (status(PartState.READY, restarts=2), "vllm ready at http://127.0.0.1:8100 (restarts: 2)"),
        (
            status(PartState.WAITING, "ended with exit code 1; restart in 4 s"),
            "vllm waiting: ended with exit code 1; restart in 4 s",
        ),
    ],
)
def test_a_status_as_one_line(part: PartStatus, line: str) -> None:
    assert describe(part) == line


def test_without_a_terminal_every_change_is_a_dated_line() -> None:
    output = StringIO()
    with open_board(Console(file=output), LineBoard, TableBoard) as board:
        board.changed(status(PartState.STARTING))
        board.say("gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)
    first, second = output.getvalue().splitlines()
    assert datetime.fromisoformat(first.split(" ", 1)[0]).tzinfo is not None
    assert first.endswith(" vllm starting")
    assert second.endswith(" gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)


def test_a_terminal_shows_a_table_with_failures_above_it() -> None:
    output = StringIO()
    with open_board(Console(file=output, force_terminal=True, width=120), LineBoard, TableBoard) as board:
        board.changed(replace(status(PartState.READY), name="gateway"))
        board.changed(status(PartState.WAITING, "was ended by SIGKILL; restart in 0.5 s", restarts=1))
    text = output.getvalue()
    assert "vllm waiting: was ended by SIGKILL; restart in 0.5 s" in text
    assert "http://127.0.0.1:8100" in text
    assert "3 min" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_table_shows_how_long_a_start_takes_and_restarts_once_there_are_some(tmp_path: Path, width: int) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=width)
    board = TableBoard(console)
    model = ModelFacts(tmp_path, "tiny", ChatFormat(Thinking.NEVER, None, None))
    engine = parts.vllm("vllm", model, EngineOptions(1, ()), "CPU", {})
    board.changed(replace(status(PartState.READY), name="combined-worker"))
    board.changed(status(PartState.STARTING, engine.starting))
    with console.capture() as capture:
        console.print(board)
    assert "loading the model, usually 30 s to 3 minutes  " in capture.get()
    assert "restarts" not in capture.get()
    board.changed(status(PartState.READY, restarts=2))
    with console.capture() as capture:
        console.print(board)
    assert "restarts" in capture.get()


# A draining server answers what is under way and one more request on each connection; a shared socket is shared.

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class App:
    """Answers each request once `go` is set; may send the headers before."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    headers_first: bool = False
    asked: int = 0
    cut: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.asked += 1
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        if self.headers_first:
            await send(head)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cut += 1
            raise
        if not self.headers_first:
            await send(head)
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Serving:
    app: App
    server: DrainingServer
    port: int
    serving: asyncio.Task[None]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def stop(self, number: signal.Signals) -> None:
        self.server.handle_exit(number, None)

    async def accepted(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.server.server_state.connections) < count:
                await asyncio.sleep(0.01)

    async def asked(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.app.asked < count:
                await asyncio.sleep(0.01)


def server_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=CUT_SECONDS,
        timeout_keep_alive=75,
    )


@asynccontextmanager
async def serving(app: App, drain_seconds: float = 60) -> AsyncIterator[Serving]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(server_config(app), listener, timedelta(seconds=drain_seconds), lambda: None)
    running = Serving(app, server, listener.getsockname()[1], asyncio.create_task(server._serve([])))
    try:
        yield running
    finally:
        app.go.set()
        if not running.serving.done():
            running.stop(signal.SIGTERM)
        await asyncio.wait_for(running.serving, 30)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than a second for the client's next request."""
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 20.0)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert await reader.readexactly(2) == b"ok"
    return head.lower()


async def test_requests_under_way_are_finished_and_their_connections_closed() -> None:
    async with serving(App()) as running:
        reader, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.3)
        running.app.go.set()
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        writer.close()
        await asyncio.wait_for(running.serving, 30)


@pytest.mark.usefixtures("patient")
async def test_an_idle_connection_gets_one_more_answer_that_closes_it() -> None:
    async with serving(App()) as running:
        running.app.go.set()
        reader, writer = await running.connect()
        writer.write(GET)
        assert b"connection" not in await _answer(reader)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.2)
        writer.write(GET)
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("patient")
async def test_a_connection_whose_headers_are_sent_gets_one_more_answer() -> None:
    async with serving(App(headers_first=True)) as running:
        reader, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.2)
        running.app.go.set()
        assert b"connection" not in await _answer(reader)
        writer.write(GET)
        assert b"connection: close" in await _answer(reader)
        writer.close()


async def test_a_silent_connection_is_closed_and_does_not_hold_up_the_end() -> None:
    async with serving(App()) as running:
        reader, writer = await running.connect()
        running.stop(signal.SIGTERM)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await asyncio.wait_for(running.serving, 30)


@pytest.mark.parametrize("before", [b"", GET], ids=["alone", "behind another request"])
async def test_a_request_whose_head_arrives_in_two_parts_is_answered_however_late_the_second(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 0.2)
    async with serving(App()) as running:
        running.app.go.set()
        silent, silent_writer = await running.connect()
        reader, writer = await running.connect()
        writer.write(before + GET[:10])
        await running.accepted(2)
        if before:
            await _answer(reader)
        running.stop(signal.SIGTERM)
        assert await asyncio.wait_for(silent.read(), 30) == b""
        await asyncio.sleep(0.3)  # what is silent as long is closed by now, whenever the server read its part
        writer.write(GET[10:])
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        for connected in (writer, silent_writer):
            connected.close()


async def test_a_head_that_does_not_arrive_holds_up_the_end_as_long_as_heads_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 2.0)
    async with serving(App(), drain_seconds=600) as running:
        reader, writer = await running.connect()
        writer.write(GET[:10])
        await running.accepted(1)
        running.stop(signal.SIGTERM)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408 ")
        await asyncio.wait_for(running.serving, 30)
        writer.close()


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]])
async def test_sigint_cuts_requests_also_during_a_drain(before: list[signal.Signals]) -> None:
    async with serving(App(), drain_seconds=600) as running:
        _, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        for number in (*before, signal.SIGINT):
            running.stop(number)
        await asyncio.wait_for(running.serving, 30)
        assert running.app.cut == 1
        writer.close()


async def test_connections_that_arrive_together_are_shared() -> None:
    held = socket.create_server(("127.0.0.1", 0), backlog=100)
    apps = [App(), App()]
    servers = []
    for app in apps:
        servers.append(DrainingServer(server_config(app), held.dup(), timedelta(seconds=60), lambda: None))
        app.go.set()
    # They wait in the kernel's queue until the servers start.
    clients = [await asyncio.open_connection(*held.getsockname()) for _ in range(20)]
    tasks = [asyncio.create_task(server._serve([])) for server in servers]
    for reader, writer in clients:
        writer.write(GET)
        await _answer(reader)
    for server in servers:
        server.handle_exit(signal.SIGTERM, None)
    for _, writer in clients:
        writer.close()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    held.close()
    assert sum(app.asked for app in apps) == 20
    assert all(app.asked for app in apps)
