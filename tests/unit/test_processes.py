"""Processes: how they begin, report and end."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker, WorkerConfig

from clawloop.app.local.checks import choose_port
from clawloop.app.processes import worker_process
from clawloop.app.processes.worker_process import WorkerRole, run_workers
from clawloop.app.temporal.plugin import ClawloopPlugin, connect
from clawloop.core.crash_points import CrashPoint
from clawloop.core.errors import SetupError
from clawloop.core.heartbeat import heartbeating
from clawloop.core.telemetry.logs import log_role
from clawloop.serving import engine_log
from clawloop.serving.engine_log import VARIABLE, WITHHELD, LogFilter
from workflows import activity_options

# How processes end: with their exit code and output, skipping Python's own shutdown.

# Shutting this interpreter down aborts, as it may beside a thread that calls into it.
PROGRAM = """
import atexit, os, sys
from clawloop.app.processes.process_exit import run_and_exit
atexit.register(os.abort)
def run():
    print("done")
    {end}
run_and_exit(run)
"""


def run_until(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n")],
)
def test_a_process_ends_with_its_exit_code_and_skips_pythons_shutdown(end: str, code: int, stderr: str) -> None:
    process = run_until(end)
    assert (process.returncode, process.stdout, process.stderr) == (code, "done\n", stderr)


def test_an_uncaught_exception_is_printed_with_its_traceback() -> None:
    process = run_until("raise LookupError('lost')")
    assert "LookupError: lost" in process.stderr
    assert process.returncode != 0


@pytest.mark.parametrize(("end", "closed", "code"), [("pass", 1, 0), ("sys.exit('no')", 2, 1)])
def test_a_process_whose_output_is_closed_ends_with_its_exit_code(end: str, closed: int, code: int) -> None:
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}>&-', sys.executable, PROGRAM.format(end=end)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (code, "")


# The health port of a worker, which is served before Temporal answers.


async def _no_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
    raise AssertionError("Temporal answers on a port where nothing listens")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    port, nothing = (choose_port(name, "127.0.0.1", 0, "") for name in ("health", "Temporal"))
    registry = CollectorRegistry()
    Counter("secrets", "told to nobody", registry=registry)
    role = WorkerRole("test", _no_workers, registry)
    working = asyncio.create_task(run_workers("test", f"127.0.0.1:{nothing}", [role], port))
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        while True:
            try:
                await client.get(f"http://127.0.0.1:{port}/healthz")
                break
            except httpx.TransportError:
                assert not working.done(), working.result()
                await asyncio.sleep(0.05)
    yield port
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_of_several_roles_each_has_its_metrics_and_the_end_of_one_ends_all_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, ending, named = choose_port("health", "127.0.0.1", 0, ""), asyncio.Event(), list[str | None]()

    async def connected(address: str) -> None:
        pass

    async def has_none(client: Client, stack: AsyncExitStack) -> list[Worker]:
        named.append(log_role.get())
        return []

    async def ends(client: Client, stack: AsyncExitStack) -> list[Worker]:
        named.append(await asyncio.create_task(_its_role()))
        await ending.wait()
        raise SetupError("its key is gone")

    monkeypatch.setattr(worker_process, "connect", connected)
    roles = []
    for name, create in (("one", has_none), ("two", ends)):
        registry = CollectorRegistry()
        Counter(name, "of this role", registry=registry)
        roles.append(WorkerRole(name, create, registry))
    working = asyncio.create_task(run_workers("both", "127.0.0.1:1", roles, port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        async with asyncio.timeout(30):
            while len(named) < 2:
                await asyncio.sleep(0.01)
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (503, {"status": "not ready", "roles": ["two"]})
        pages = {name: (await client.get(f"/metrics/{name}")).text for name in ("one", "two")}
        assert (await client.get("/metrics")).status_code == 404
    assert [("one_total" in page, "two_total" in page) for page in pages.values()] == [(True, False), (False, True)]
    ending.set()
    with pytest.raises(SetupError, match=r"^two: its key is gone$"):
        await working
    assert named == ["one", "two"]
    assert log_role.get() is None


async def _its_role() -> str | None:
    return log_role.get()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "10.1.2.3:8081", "[::1]:9"])
async def test_addresses_and_loopback_names_are_answered(port: int, host: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Host": host}) as client:
        assert "secrets_total" in (await client.get("/metrics")).text
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503


@pytest.mark.parametrize(
    "host", ["rebound.example", "127.0.0.1.rebound.example:8081", "", "localhost@rebound.example", "["]
)
async def test_other_names_are_not_answered(port: int, host: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Host": host}) as client:
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            refused = await client.get(path)
            assert (refused.status_code, "secrets" in refused.text) == (421, False)


async def test_one_host_is_named(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.split()[1] in ("400", "421")
    assert "secrets" not in answer


# A heartbeat beside the work: it beats, ends with the work, and never hides what went wrong.


def environment(beat: Any) -> ActivityEnvironment:
    made = ActivityEnvironment()
    made.info = replace(made.info, heartbeat_timeout=timedelta(seconds=0.02))
    made.on_heartbeat = beat
    return made


async def test_it_beats_while_the_work_lasts_and_no_longer() -> None:
    beats: list[object] = []

    async def work() -> int:
        async with heartbeating():
            async with asyncio.timeout(30):
                while len(beats) < 3:
                    await asyncio.sleep(0.005)
        return len(beats)

    during = await environment(lambda *_: beats.append(None)).run(work)
    assert during >= 3
    await asyncio.sleep(0.05)
    assert len(beats) == during


async def test_a_beat_that_breaks_ends_the_work() -> None:
    def broken(*_: object) -> None:
        raise OSError("no beat")

    async def work() -> None:
        async with heartbeating():
            await asyncio.sleep(60)

    with pytest.raises(OSError, match="no beat"):
        await environment(broken).run(work)


async def test_the_works_own_error_comes_out() -> None:
    async def work() -> None:
        async with heartbeating():
            raise ValueError("the work's")

    with pytest.raises(ValueError, match="the work's"):
        await environment(lambda *_: None).run(work)


async def test_workers_keep_no_beat_back() -> None:
    config: WorkerConfig = {"client": await connect("127.0.0.1:1", lazy=True)}
    told = ClawloopPlugin().configure_worker(config).get("max_heartbeat_throttle_interval", timedelta.max)
    limits = [
        options["heartbeat_timeout"]
        for options in vars(activity_options).values()
        if isinstance(options, dict) and "heartbeat_timeout" in options
    ]
    assert told < min(limits) / 2


async def test_outside_an_activity_it_is_nothing() -> None:
    async with heartbeating():
        pass


# What of vLLM's output reaches its log: shapes seen of vLLM 0.32 and xgrammar 0.2.

SERVES = "INFO:     Application startup complete."
HEAD = "(APIServer pid=7) WARNING 11-23 06:01:54 [chat_utils.py:2199]"


def filtered(*lines: str) -> list[str]:
    serving = LogFilter()
    serving.line(SERVES)
    return [kept for line in lines if (kept := serving.line(line)) is not None]


@pytest.mark.parametrize(
    "line",
    [
        "[13:10:01] /project/cpp/json_schema_converter.cc:1499: Warning: URI should be '#' but got SECRET",
        "Regex parsing warning at position 3: the character is ignored: SECRET",
        "SECRET",
        "SECRETError: of a client",
        "prompt: SECRET",
        f'{HEAD} Tool call "SECRET" has arguments that are not valid JSON',
        "(EngineCore pid=9) ERROR 11-23 06:01:54 [x.py:1] SECRET",
        "(EngineCore pid=9) DEBUG 11-23 06:01:54 [x.py:1] SECRET",
        "(APIServer pid=9) INFO 11-23 06:01:54 [request_logger.py:65] Received request: SECRET",
        "(APIServer pid=9) INFO 11-23 06:01:54 [entrypoints/serve/utils/request_logger.py:65] Received: SECRET",
        "ERROR:    SECRET",
        "INFO:     SECRET",
        "RuntimeError: SECRET",
        "vllm.exceptions.VLLMValidationError: SECRET",
        "ValueError: Regex compilation timed out after 5s. The pattern may be too complex. Pattern: SECRET",
        'INFO:     127.0.0.1:1 - "GET /health?SECRET HTTP/1.1" 200 OK',
        '{"message": "SECRET"}',
    ],
)
def test_what_may_quote_a_request_is_withheld(line: str) -> None:
    assert not any("SECRET" in kept and kept != "SECRETError" for kept in filtered(line, ""))


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=7) INFO 11-23 06:01:54 [loggers.py:271] Engine 000: Avg prompt throughput: 1.0 tokens/s",
        'INFO:     127.0.0.1:60336 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
        "INFO:     Shutting down",
        "(APIServer pid=7) WARNING 11-23 06:01:54 [utils.py:648] [shutdown] Process manager: force killing",
        "(EngineCore pid=7) ERROR 11-23 06:01:54 [core.py:1512] EngineCore encountered a fatal error.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "(EngineCore pid=7) ERROR 11-23 06:01:54 [core.py:1512] RuntimeError: CUDA error: an illegal access",
    ],
)
def test_what_an_operator_needs_stays(line: str) -> None:
    assert filtered(line) == [line]


def test_the_reason_stays_that_a_pattern_took_too_long() -> None:
    said = "ValueError: Regex compilation timed out after 5s."
    assert filtered(f"{said} The pattern may be too complex. Pattern: SECRET") == [said]


def test_of_a_traceback_the_places_and_the_kind_stay() -> None:
    head = "(EngineCore pid=9) ERROR 11-23 06:01:54 [core.py:1512]"
    frame = '  File "/x/xgrammar/compiler.py", line 3, in compile_json_schema'
    lines = [
        "Traceback (most recent call last):",
        frame,
        "    compile(SECRET)",
        "            ^^^^^^",
        "ValueError: SECRET",
    ]
    shown = ["Traceback (most recent call last):", frame, "ValueError"]
    assert filtered(*lines) == shown
    assert filtered(*(f"{head} {line}" for line in lines)) == [f"{head} {line}" for line in shown]


def test_many_lines_of_one_text_are_one() -> None:
    assert filtered(f"{HEAD} SECRET", f"{HEAD} SECRET", "a", "b", f"{HEAD} SECRET") == [
        f"{HEAD} {WITHHELD}",
        WITHHELD,
        f"{HEAD} {WITHHELD}",
    ]


def test_the_start_of_an_engine_is_shown_whole() -> None:
    starting = LogFilter()
    assert starting.line("ValueError: the model has no config.json") == "ValueError: the model has no config.json"


NOISY_PROGRAM = f"""
import os, signal, sys, time
print({SERVES!r}, flush=True)
os.write(2, b"SECRET of a client\\n")
print("pid", os.getpid(), file=open(sys.argv[1], "w"), flush=True)
signal.sigwait({{signal.SIGUSR1}})
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("whole", [False, True])
def test_the_engine_is_the_process_that_was_started(tmp_path: Path, whole: bool) -> None:
    command = [
        sys.executable,
        "-m",
        engine_log.__name__,
        sys.executable,
        "-c",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + NOISY_PROGRAM,
        str(tmp_path / "pid"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env={VARIABLE: "whole"} if whole else {})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert started.poll() is None
        time.sleep(0.01)
    assert (tmp_path / "pid").read_text() == f"pid {started.pid}\n"
    started.send_signal(signal.SIGUSR1)
    assert started.wait() == -signal.SIGTERM
    wanted = f"{SERVES}\n" + ("SECRET of a client\n" if whole else f"{WITHHELD}\n")
    deadline = time.monotonic() + 60  # the filter writes the last line after the end of the engine
    while log.read_text() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == wanted


def test_a_command_that_cannot_run_says_so() -> None:
    command = [sys.executable, "-m", engine_log.__name__, "/no/such/program"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (
        127,
        "cannot run /no/such/program: No such file or directory\n",
    )


# A crash point kills its process once, where it is armed, and is in one place of the code.

ROOT = Path(__file__).parents[2]
DYING_PROGRAM = """
import sys
from pathlib import Path
from clawloop.core.crash_points import CrashPoint, arm_crash_points, crash_point
crash_point(CrashPoint.CLAIMED)  # not looked for yet
arm_crash_points(Path(sys.argv[1]))
crash_point(CrashPoint.COMMITTED)
crash_point(CrashPoint.CLAIMED)
"""


def test_an_armed_point_kills_the_first_process_that_reaches_it(tmp_path: Path) -> None:
    (tmp_path / CrashPoint.CLAIMED).touch()
    command = [sys.executable, "-c", DYING_PROGRAM, str(tmp_path)]
    assert [subprocess.run(command, cwd=ROOT).returncode for _ in range(2)] == [-signal.SIGKILL, 0]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("point", CrashPoint, ids=str)
def test_each_point_is_in_one_place(point: CrashPoint) -> None:
    sources = [path for folder in ("activities", "api", "clawloop", "db") for path in (ROOT / folder).rglob("*.py")]
    used = [path for path in sources for _ in re.findall(rf"CrashPoint\.{point.name}\b", path.read_text())]
    assert len(used) == 1
