"""The supervisor restarts parts, reports why they ended, and stops them in order. Real child processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from clawloop.app.local.parts import Deployment, gateways
from clawloop.app.local.supervision.supervisor import Launch, Part, PartLog, PartState, RestartPolicy, Supervisor
from clawloop.core.errors import SetupError
from tests.local.status_recorder import StatusRecorder

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
