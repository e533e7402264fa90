"""`clawloop demo run` as a process: real PostgreSQL and Temporal, a fake gateway, no model.

tests/e2e runs it without fakes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from clawloop.app.cli.demo import run_command
from clawloop.app.cli.up import prepare_deployment
from clawloop.app.demo import run as demo_run
from clawloop.core.settings import Settings
from tests.fakes.model_server import model_server
from tests.processes import alive, by_name

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("demo_with_fakes.py")
START_SECONDS = 180
# A busy machine takes several times the 20 s.
STOP_SECONDS = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Serves its model name as vLLM does."""
    with model_server("clawloop-demo") as url:
        yield url


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's; no test reads more of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


class Demo:
    """A `clawloop demo` process and its output so far."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.output = folder / f"printed-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as written:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *command],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) | {"PYTHONPATH": str(PROGRAM.parents[2])},
                cwd=folder,
            )

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def line(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(pattern, self.printed, re.MULTILINE)) is None:
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.05)
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def demo(folder: Path, *command: str) -> Iterator[Demo]:
    running = Demo(folder, *command)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait(STOP_SECONDS)


def test_a_run_shows_the_learning_writes_its_report_and_cleans_up(tmp_path: Path, engine: str, model: Path) -> None:
    with demo(tmp_path, engine, str(model), "run", "--quick", "--interactions", "40", "--data", "data") as running:
        assert running.process.wait(START_SECONDS) == 0, running.printed
    assert re.search(r"^ +1 +combined +1 +\d+ +\+1\.00 +\d+% +0 +\d+$", running.printed, re.MULTILINE)
    said = running.printed.splitlines()[-1]
    assert re.match(r"match \d\d% → 100% in 40 interactions, 90 % after \d+; right content 100%; requests fail", said)
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert (report["seed"], report["interactions"], report["match_after"]) == (1, 40, 1.0)
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "data" / "demo").exists()


def test_a_second_demo_is_refused_and_ctrl_c_cleans_up(tmp_path: Path, engine: str, model: Path) -> None:
    with demo(tmp_path, engine, str(model), "run", "--quick", "--interactions", "900", "--data", "data") as running:
        running.line(r"combined +1 +\d")
        with demo(tmp_path, engine, str(model), "run", "--quick", "--data", "data") as second:
            assert second.process.wait(START_SECONDS) == 1
        assert second.printed == (
            f"clawloop: a demo already runs on {tmp_path}/data/demo (process {running.process.pid}):"
            " stop it first, or choose another folder: --data\n"
        )
        children = running.children()
        assert {"temporal", "postgres"} <= by_name(children).keys()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(STOP_SECONDS) == 130
    assert alive(children) == []
    assert running.printed.splitlines()[-1] == (
        "clawloop: stopped before the end; nothing is left running, and there is no report"
    )
    assert "Traceback" not in running.printed
    assert not (tmp_path / "data" / "demo").exists()
    assert not (tmp_path / "demo-report.json").exists()


@pytest.mark.long
def test_interrupted_in_the_second_run_the_report_has_the_first(tmp_path: Path, engine: str, model: Path) -> None:
    command = ["run", "--quick", "--seeds", "2", "--interactions", "8", "--data", "data"]
    with demo(tmp_path, engine, str(model), *command) as running:
        running.line(r"^ +2 +combined +")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(STOP_SECONDS) == 130
    assert running.printed.splitlines()[-1] == (
        "clawloop: stopped before the end; nothing is left running, and 1 finished of 2 are in the report"
    )
    assert [run["seed"] for run in json.loads((tmp_path / "demo-report.json").read_text())["runs"]] == [1]


@pytest.mark.long
def test_keep_prints_the_addresses_and_waits_for_ctrl_c(tmp_path: Path, engine: str, model: Path) -> None:
    with demo(
        tmp_path, engine, str(model), "run", "--quick", "--interactions", "8", "--keep", "--data", "data"
    ) as running:
        key = running.line(r"gateway +http://\S+/v1, model `policy`, key (cl-\S+)$").group(1)
        running.line(r"see it learn: http://\S+/ui, key cl-\S+$")
        running.line(r"page +http://\S+/ui$")
        running.line(r"Temporal UI +http://")
        running.line(r"clawloop chat --data ")
        running.line(r"Ctrl-C stops everything")
        assert json.loads((tmp_path / "data" / "demo" / "demo.json").read_text())["key"] == key
        assert (tmp_path / "demo-report.json").exists()
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(STOP_SECONDS) == 0, running.printed
    assert alive(children) == []
    assert (tmp_path / "data" / "demo" / "postgres").exists()


def invoked(monkeypatch: pytest.MonkeyPatch, model: Path, *options: str) -> list[str]:
    """What a run that fails prints, in this process: starting one takes ten times as long."""
    monkeypatch.setattr(demo_run, "CHAT_MODEL", model)
    demo_app = typer.Typer()
    demo_app.command()(run_command(Settings, lambda: prepare_deployment))
    done = CliRunner().invoke(demo_app, options)
    assert done.exit_code == 1, done.output
    return done.output.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quick", "--seed", "one"], "--seed 'one': a seed is a whole number from 0 to 4294967295"),
        (
            ["--quick", "--methods", "grpo"],
            "--methods 'grpo': use binary, opd, combined, hybrid, hindsight, or several",
        ),
        (["--quick", "--interactions", "0"], "--interactions 0: give 4 to 1000; a step takes 4 samples"),
        (["--quick", "--flip", "colour"], "--flip 'colour': use code, length, tone, several with commas, or all"),
        (["--quick", "--model", "smollm2"], "--quick and --model: give one of them"),
        (["--quick", "--port", "{taken}"], "port {taken} for the gateway is in use"),
        (["--quick", "--data", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["--quick", "--out", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["--flip", "all"], "--flip: only with --quick, the toy; a user of a pretrained model has one taste"),
        (["--methods", "combined"], "--methods combined: with a pretrained model it is hindsight alone"),
        (["--environment", "swe", "--quick"], "--environment: leave out --model, --quick, "),
    ],
)
def test_invalid_options_are_one_line_and_leave_nothing(
    tmp_path: Path, engine: str, model: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = engine.rsplit(":", 1)[1]
    arguments = [option.format(taken=taken) for option in options]
    lines = invoked(monkeypatch, model, "--data", str(tmp_path / "data"), *arguments)
    assert [line for line in lines if line.startswith("clawloop: ")] == [lines[-1]]
    assert lines[-1].startswith(f"clawloop: {message.format(taken=taken)}")
    assert not (tmp_path / "data" / "demo").exists()


def test_a_missing_model_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = invoked(monkeypatch, tmp_path, "--quick", "--data", str(tmp_path / "data"))
    assert lines == [f"clawloop: the demo model is not in {tmp_path}: make it with `clawloop demo pretrain`"]
