"""Parts are kept running, told apart in their reasons, and ended in order. Real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from clawloop.errors import SetupError
from clawloop.local.supervision.part import Launch, Part, PartState
from clawloop.local.supervision.part_log import PartLog
from clawloop.local.supervision.supervisor import Patience, Supervisor
from tests.local.captured_output import Told

QUICK = Patience(
    first=timedelta(seconds=0.05),
    most=timedelta(seconds=0.2),
    forgiven_after=timedelta(seconds=0.5),
    look_every=timedelta(seconds=0.05),
    silent_for=timedelta(seconds=0.3),
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
async def supervising(folder: Path, patience: Patience = QUICK) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    supervisor = Supervisor(folder, told, patience)
    others = set(psutil.Process().children(recursive=True))  # what fixtures of the whole session run
    try:
        yield supervisor, told
    finally:
        await supervisor.stop([{status.name for status in told.statuses}])
    assert set(psutil.Process().children(recursive=True)) <= others


async def test_a_part_that_dies_is_started_again_and_its_end_is_said(tmp_path: Path) -> None:
    program = "import sys, time; time.sleep(0.3); print('ValueError: no more'); print('bye'); sys.exit(7)"
    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("worker", program))
        await supervisor.ready("worker")
        waiting = await told.until("worker", PartState.WAITING)
        assert waiting.detail == "ended with exit code 7: ValueError: no more; again in 0.05 s"
        assert waiting.restarts == 1
        ready_again = await told.until("worker", PartState.READY, times=2)
        assert ready_again.restarts == 1
    assert told.states("worker")[-1] is PartState.STOPPED
    assert (tmp_path / "worker.log").read_text().count("--- started") >= 2


async def test_a_part_that_is_killed_is_started_again_and_the_signal_is_named(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("worker", "print('all is well'); " + SLEEPS))
        await supervisor.ready("worker")
        async with asyncio.timeout(30):
            while (running := _guarded_process("all is well")) is None:
                await asyncio.sleep(0.02)
        running.send_signal(signal.SIGSEGV)
        waiting = await told.until("worker", PartState.WAITING)
        assert waiting.detail == "was ended by SIGSEGV; again in 0.05 s"
        await told.until("worker", PartState.READY, times=2)


def _guarded_process(marker: str) -> psutil.Process | None:
    """The one process of ours, below its guard, whose command holds `marker`; the session's fixtures have others."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if marker in command and "clawloop.local.supervision.guard" not in command:
                return process
    return None


async def test_a_part_that_never_gets_ready_is_given_up_with_its_reason(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("broken", "print('bind: address in use'); raise SystemExit(2)", never))
        with pytest.raises(SetupError) as raised:
            await supervisor.ready("broken")
        assert str(raised.value) == (
            "broken did not start, 3 times: ended with exit code 2: bind: address in use"
            f" (all of it: {tmp_path / 'broken.log'})"
        )
        with pytest.raises(SetupError):
            await supervisor.first_failure()
    assert told.states("broken").count(PartState.STARTING) == 3
    assert told.states("broken")[-1] is PartState.FAILED


async def test_a_part_that_cannot_be_prepared_is_given_up_at_once(tmp_path: Path) -> None:
    def refuse() -> Launch:
        raise SetupError("port 5432 is in use")

    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(Part("database", "", refuse, always))
        with pytest.raises(SetupError, match="port 5432 is in use"):
            await supervisor.ready("database")
    assert told.states("database") == [PartState.STARTING, PartState.FAILED]


async def test_another_parts_failure_ends_the_wait_for_one_that_is_slow(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("slow", SLEEPS, never))
        supervisor.start(part("broken", "raise SystemExit(1)", never))
        with pytest.raises(SetupError, match="broken did not start"):
            await supervisor.ready("slow")


async def test_a_part_that_is_not_ready_in_time_is_started_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("slow", SLEEPS, never, start_within=timedelta(seconds=0.3)))
        waiting = await told.until("slow", PartState.WAITING)
        assert waiting.detail.startswith("not ready after 0.3 s")


async def test_a_part_that_stops_answering_is_started_again(tmp_path: Path) -> None:
    answers = iter([True, True])

    async def at_first() -> bool:
        return next(answers, False)

    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("hung", SLEEPS, at_first))
        waiting = await told.until("hung", PartState.WAITING)
        assert waiting.detail == "no answer for 0.3 s; again in 0.05 s"
        assert told.states("hung")[:3] == [PartState.STARTING, PartState.READY, PartState.WAITING]


async def test_progress_is_read_from_the_log(tmp_path: Path) -> None:
    program = "import time; print('noise', flush=True); print('loading 7', flush=True); time.sleep(600)"

    def progress(line: str) -> str | None:
        return line.replace("loading", "loads") if line.startswith("loading") else None

    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(replace(part("engine", program, never), progress=progress))
        assert (await told.until("engine", PartState.STARTING, times=2)).detail == "loads 7"


async def test_parts_end_in_the_order_given(tmp_path: Path) -> None:
    record = tmp_path / "ends"
    says = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.1); open({0!r}, 'a').write(sys.argv[0] + {1!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('armed', flush=True)\ntime.sleep(600)"
    )
    async with supervising(tmp_path) as (supervisor, _):
        for name in ("first", "second", "third"):

            async def armed(log: Path = tmp_path / f"{name}.log") -> bool:
                return log.exists() and "armed" in log.read_text()

            supervisor.start(part(name, says.format(str(record), f" {name}\n"), armed))
            await supervisor.ready(name)
        await supervisor.stop([["third"], ["second"], ["first"], ["never started"]])
    assert record.read_text() == "-c third\n-c second\n-c first\n"


async def test_a_part_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('armed', flush=True);" + SLEEPS

    async def armed() -> bool:
        return "armed" in (tmp_path / "stubborn.log").read_text()

    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("stubborn", program, armed, stop_within=timedelta(seconds=0.4)))
        await supervisor.ready("stubborn")
        begun = time.monotonic()
        await supervisor.stop([["stubborn"]])
        assert 0.4 <= time.monotonic() - begun < 20


async def test_hurry_ends_the_patience_of_a_stop(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('armed', flush=True);" + SLEEPS

    async def armed() -> bool:
        return "armed" in (tmp_path / "stubborn.log").read_text()

    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("stubborn", program, armed, stop_within=timedelta(minutes=5)))
        await supervisor.ready("stubborn")
        stopping = asyncio.create_task(supervisor.stop([["stubborn"]]))
        await told.until("stubborn", PartState.STOPPING)
        async with asyncio.timeout(30):  # its patience is 5 min
            while not stopping.done():
                await asyncio.sleep(0.2)
                supervisor.hurry()  # again, should its guard have seen one signal instead of two
        await stopping


async def test_a_stop_between_two_starts_starts_nothing_more(tmp_path: Path) -> None:
    async with supervising(tmp_path, replace(QUICK, first=timedelta(minutes=5), most=timedelta(minutes=5))) as (
        supervisor,
        told,
    ):
        supervisor.start(part("worker", "raise SystemExit(1)", never))
        await told.until("worker", PartState.WAITING)
        async with asyncio.timeout(30):  # its pause is 5 min
            await supervisor.stop([["worker"]])
    assert told.states("worker") == [PartState.STARTING, PartState.WAITING, PartState.STOPPED]


async def test_a_stop_during_a_start_leaves_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, told):
        supervisor.start(part("worker", SLEEPS, never))
        await told.until("worker", PartState.STARTING)  # nothing has been spawned yet
        async with asyncio.timeout(30):
            await supervisor.stop([["worker"]])
    assert told.states("worker")[-1] is PartState.STOPPED


def test_pauses_double_up_to_half_a_minute() -> None:
    patience = Patience()
    assert [patience.pause(n).total_seconds() for n in (1, 2, 3, 6, 7, 8, 10_000)] == [0.5, 1, 2, 16, 30, 30, 30]


@pytest.mark.slow
async def test_pauses_start_anew_after_a_while_in_health(tmp_path: Path) -> None:
    program = f"""
import pathlib, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
n = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (n + 1))
time.sleep(2.5 if n == 2 else 0.15)
"""
    # Far above a short life, which a busy machine may draw out.
    async with supervising(tmp_path, replace(QUICK, forgiven_after=timedelta(seconds=2))) as (supervisor, told):
        supervisor.start(part("worker", program))
        await told.until("worker", PartState.WAITING, times=4)
    pauses = [s.detail.rsplit("in ", 1)[1] for s in told.statuses if s.state is PartState.WAITING][:4]
    assert pauses == ["0.05 s", "0.1 s", "0.05 s", "0.1 s"]


async def test_a_part_that_writes_without_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    flood = "import time; print('x' * (11 * 2**20), flush=True); print('then', flush=True); time.sleep(60)"
    log = tmp_path / "flood.log"
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start(part("flood", flood))
        await supervisor.ready("flood")
        async with asyncio.timeout(30):
            while not log.with_name("flood.log.1").exists() or log.stat().st_size > 100:
                await asyncio.sleep(0.02)


def test_a_log_is_bounded_while_its_part_goes_on_writing(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "vllm.log", most_bytes=100)
    with log.open_for_run() as file:
        for number in range(50):
            file.write(b"line %d\n" % number)
            file.flush()
            log.keep_bounded()
            assert log.path.stat().st_size <= 110
            assert list(log.new_lines()) in ([], [f"line {number}"])
        file.write(b"ValueError: the end\n")
        file.flush()
    assert log.path.with_name("vllm.log.1").stat().st_size <= 110
    assert b"\0" not in log.path.read_bytes()
    assert log.last_words() == "ValueError: the end"


def test_a_log_that_grew_too_large_is_moved_aside_at_a_start(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "logs" / "vllm.log", most_bytes=100)
    for text in (b"first " * 30, b"second " * 30, b"third"):
        with log.open_for_run() as file:
            file.write(text)
    assert b"third" in log.path.read_bytes()
    assert b"second" not in log.path.read_bytes()
    assert b"second" in log.path.with_name("vllm.log.1").read_bytes()
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["vllm.log", "vllm.log.1"]


def test_last_words_are_of_this_run_only_and_prefer_an_error(tmp_path: Path) -> None:
    log = PartLog(tmp_path / "x.log")
    with log.open_for_run() as file:
        file.write(b"RuntimeError: of an earlier run\n")
    with log.open_for_run() as file:
        file.write("\x1b[31mall\x1b[0m well \xff\n".encode("latin-1"))
    assert log.last_words() == "all well \ufffd"
    assert log.last_words(any_line=False) == ""
    with log.open_for_run() as file:
        file.write(b"OSError: [Errno 98] in use\nmore talk\n\n")
    assert log.last_words(any_line=False) == "OSError: [Errno 98] in use"
