"""`clawloop up` on real PostgreSQL and Temporal, with a stand-in gateway and an external engine.

tests/e2e has the same with vLLM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.local.tiny_model import ensure_tiny_model
from db.schema import migrate
from tests.conftest import execute
from tests.fakes.model_server import model_server
from tests.processes import alive, by_name
from tests.verbs import refusal

PROGRAM = str(Path(__file__).with_name("up_with_stand_ins.py"))
FREE_PORTS = [f"--{part}port=0" for part in ("", "temporal-", "temporal-ui-", "engine-")]


class Running:
    """A `clawloop up` process and its output so far."""

    def __init__(self, data: Path, *options: str, program: str = PROGRAM, **environment: str) -> None:
        if not any(option.startswith("--model") for option in options) and "CLAWLOOP_ENGINES" not in environment:
            options = (*options, "--model", str(ensure_tiny_model(data.parent / "models")))
        command = [sys.executable, program, "up", "--data", str(data), *FREE_PORTS, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ) | environment
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def line(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """The first line that matches; waits for it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"no line like {pattern!r} in\n" + "\n".join(self.lines))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self._reader.join()
        return code


def open_to_others(data: Path) -> list[Path]:
    """The data folder, and the files and folders in it, that another user may open."""
    return [path for path in (data, *data.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]


@contextmanager
def up(data: Path, *options: str, program: str = PROGRAM, **environment: str) -> Iterator[Running]:
    running = Running(data, *options, program=program, **environment)
    try:
        yield running
    finally:
        running.process.kill()
        running.ended()
        assert running.process.stdout is not None
        running.process.stdout.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Answers `/v1/models` as vLLM does."""
    with model_server("Qwen3-4B") as url:
        yield url


def test_it_starts_everything_restarts_killed_parts_and_stops(tmp_path: Path, engine: str) -> None:
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        gateway = running.line(r"gateway +(http://127\.0\.0\.1:\d+)/v1$").group(1)
        assert running.line(r"page +(http://\S+)/ui$").group(1) == gateway
        ui = running.line(r"Temporal UI +(http://\S+)").group(1)
        running.line("every user of this machine can read and change it$")
        running.line("chat key +ck-1$")
        running.line("admin key +ak-1$")
        running.line("start 1 of Qwen3-4B as ")
        running.line("temporal ready")
        assert urllib.request.urlopen(gateway).read().decode() == engine
        assert urllib.request.urlopen(ui).status == 200
        for name in ("temporal", "postgres"):
            by_name(running.descendants())[name].kill()
        for name in ("temporal", "postgres"):
            running.line(rf"{name} waiting: was ended by SIGKILL.*; restart in 0\.5 s")
            running.line(rf"{name} ready at .* \(restarts: 1\)")
        descendants = running.descendants()
        assert {"temporal", "postgres"} <= by_name(descendants).keys()
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 0
        assert alive(descendants) == []
        ends = [line.split()[1] for line in running.lines if line.endswith(" stopped")]
        assert (sorted(ends[:2]), ends[2:]) == (["gateway-0", "gateway-1"], ["temporal", "postgres"])
        assert running.lines[-1].partition(" ")[2] == f"stopped; the data stays in {tmp_path / 'data'}"


def test_a_folder_that_others_could_read_is_tightened_and_the_database_still_starts(
    tmp_path: Path, engine: str
) -> None:
    data = tmp_path / "data"
    with up(data, CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
    for path in (data, data / "logs", data / "temporal"):
        path.chmod(0o755)
    (data / "temporal" / "temporal.db").chmod(0o644)
    with up(data, CLAWLOOP_ENGINES=engine) as running:
        running.line(r"is for its owner alone now: 4 files and folders were open to others")
        running.line("Ctrl-C stops everything")
        assert open_to_others(data) == []


def test_data_and_keys_are_kept_and_a_second_up_on_the_folder_is_rejected(tmp_path: Path, engine: str) -> None:
    data = tmp_path / "data"
    with up(data, CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
        assert open_to_others(data) == []
        with up(data, CLAWLOOP_ENGINES=engine) as second:
            assert second.ended() == 1
            assert second.lines[-1] == (
                f"clawloop: clawloop up already runs on {data} (process {running.process.pid}):"
                " stop it first, or choose another folder: --data"
            )
        running.process.terminate()
        assert running.ended() == 0
    with up(data, "--alias", "small", "--alias", "smaller", CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
        running.line(r"start 2 of Qwen3-4B as \('small', 'smaller'\)")
        assert not any("ck-1" in line for line in running.lines)
        assert json.loads((data / "keys.json").read_text()) == {"chat": "ck-1", "admin": "ak-1"}
        watched = json.loads((data / "metric-targets.json").read_text())
        assert [one["labels"]["process"] for one in watched] == ["gateway"]  # no worker runs here
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", one["targets"][0]) for one in watched)
        running.process.terminate()
        assert running.ended() == 0


def test_a_folder_of_another_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path, engine: str) -> None:
    with running_postgres(tmp_path / "postgres") as server:
        migrate(server.url)
        execute(server.url, "UPDATE alembic_version SET version_num = '0029'")
    done = subprocess.run(
        [sys.executable, "-m", "clawloop.app.cli.main", "up", "--data", str(tmp_path), *FREE_PORTS],
        env=dict(os.environ) | {"CLAWLOOP_ENGINES": engine},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = refusal(done)
    assert "another version of Clawloop made this database's schema (revision 0029)" in said
    assert "start this one with a new data folder (--data)" in said
    with running_postgres(tmp_path / "postgres") as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0029",)]


def test_after_kill_9_no_process_is_left_and_it_starts_again(tmp_path: Path, engine: str) -> None:
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
        running.line("temporal ready")
        descendants = running.descendants()
        running.process.kill()
        deadline = time.monotonic() + 30
        while alive(descendants) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(descendants) == []
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        running.line("start 2 of Qwen3-4B")
        running.line("Ctrl-C stops everything")


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (
            ["--model", "/no/such/model"],
            {},
            "there is no model folder /no/such/model: give one in Hugging Face's layout, ",
        ),
        (["--host", "192.0.2.9", "--port", "30000"], {}, "cannot listen on 192.0.2.9:30000 for the gateway"),
        ([], {"DATABASE_URL": "postgresql://me@127.0.0.1:1/x"}, "DATABASE_URL: connection failed"),
        ([], {"TEMPORAL_ADDRESS": "127.0.0.1:1"}, "TEMPORAL_ADDRESS: no Temporal"),
        ([], {"CLAWLOOP_ENGINES": "http://127.0.0.1:1"}, "engine http://127.0.0.1:1: Cannot connect"),
        (
            ["--judge-gpus=1"],
            {"CLAWLOOP_ENGINES": "http://127.0.0.1:1"},
            "--judge-gpus: CLAWLOOP_ENGINES names engines of your own",
        ),
    ],
)
def test_an_invalid_option_or_setting_is_one_line_and_exit_code_1(
    tmp_path: Path, options: list[str], environment: dict[str, str], expected: str
) -> None:
    with up(tmp_path / "data", *options, **environment) as running:
        assert running.ended() == 1
        assert [line for line in running.lines if line.startswith("clawloop: ")] == [running.lines[-1]]
        assert running.lines[-1].startswith(f"clawloop: {expected}")
