"""`clawloop demo run`: everything started on this machine, one run after another, and what came of it.

Knows nothing about how a run goes (course.py) or how parts are run (clawloop.local).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawloop.demo.admin_client import AdminClient
from clawloop.demo.chart import draw_chart
from clawloop.demo.demo_folder import Address, demo_folder, write_address
from clawloop.demo.experiment import Place, run_experiment
from clawloop.demo.location import model_path
from clawloop.demo.plan import Plan, PlannedRun
from clawloop.demo.report import RunReport, report_run
from clawloop.demo.report_forms import as_json, in_one_line
from clawloop.demo.run_policies import insert_policies
from clawloop.demo.scoreboard import DemoBoard
from clawloop.errors import SetupError
from clawloop.local.checks import require_disk, require_folder
from clawloop.local.parts import Deployment
from clawloop.local.plan import UpOptions
from clawloop.local.up import Prepare, Started
from clawloop.local.up import run as run_up

BASE_MODEL = "clawloop-demo"
# The longest session has eight requests of about a hundred tokens.
_CONTEXT_TOKENS = 2048
# What an operator has set for his own installation is not meant for the demo.
_NOT_INHERITED = ("CLAWLOOP_", "DATABASE_URL", "TEMPORAL_ADDRESS")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """
    Args:
        data: the demo lives in its subfolder `demo`.
        out: where the report goes.
        keep: leave everything running afterwards, and the data.
        began: when setting up began, on the clock of `time.time`.
        model: a model folder; None is the one that ships with Clawloop.
        port, temporal_port, temporal_ui_port, engine_port: 0 is any free one.
    """

    plan: Plan
    data: Path
    out: Path
    environment: Mapping[str, str]
    keep: bool = False
    began: float = field(default_factory=time.time)
    model: Path | None = None
    port: int = 0
    temporal_port: int = 0
    temporal_ui_port: int = 0
    engine_port: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What a demo found.

    Args:
        seconds: of all of it, setting up included, ending not.
    """

    runs: Sequence[RunReport]
    seconds: float


async def run(options: DemoOptions, board: DemoBoard, prepare: Prepare) -> Findings | None:
    """Do what was planned and write the report; fewer runs than planned, or None, if it was told to stop before.

    Args:
        prepare: what readies the database for `clawloop up`.

    Raises:
        SetupError: something cannot start, or does not work; nothing of ours runs any more.
    """
    require_folder(options.out)
    demo = _Demo(options, board, prepare)
    with demo_folder(options.data, keep=options.keep) as folder:
        require_disk(folder)  # before the first byte is written
        up = UpOptions(
            data=folder,
            environment=_environment(options.environment),
            port=options.port,
            temporal_port=options.temporal_port,
            temporal_ui_port=options.temporal_ui_port,
            engine_port=options.engine_port,
            model=_model_in(folder, options.model or model_path()),
            dtype="float32",
            max_model_len=_CONTEXT_TOKENS,
        )
        await run_up(up, _PartsOnly(board), demo.ready, use=demo.use)
    return demo.findings


class _PartsOnly:
    """Shows how the parts are; what `clawloop up` tells its operator is not for who watches a demo."""

    def __init__(self, board: DemoBoard) -> None:
        self.changed = board.changed

    def say(self, line: str) -> None:
        """Not shown."""


class _Demo:
    def __init__(self, options: DemoOptions, board: DemoBoard, prepare: Prepare) -> None:
        self._options = options
        self._board = board
        self._prepare = prepare
        self._keys: dict[PlannedRun, str] = {}
        self.findings: Findings | None = None

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        """Satisfies `clawloop.local.up.Prepare`."""
        secrets = await self._prepare(deployment)
        self._keys = await insert_policies(deployment.database_url, deployment.base_model, self._options.plan.runs)
        return secrets

    async def use(self, started: Started) -> None:
        """Satisfies `clawloop.local.up.Use`."""
        options = self._options
        seconds_setup = time.time() - options.began
        reports: list[RunReport] = []
        for planned in options.plan.runs:
            key = self._keys[planned]
            write_address(started.deployment.data, Address(started.gateway, key, key))
            place = Place(started.gateway, key, key, started.deployment.base_model)
            evaluated, totals = await run_experiment(planned, place, self._board, options.plan)
            if totals.stopped is not None:
                self._board.say(f"{totals.stopped}; the run ends early")
            reports.append(report_run(options.plan, planned, evaluated, totals, seconds_setup))
            # After each: who stops the demo later has what was found so far.
            self.findings = Findings(tuple(reports), time.time() - options.began)
            write_report(options.out, self.findings)
            if planned != options.plan.runs[-1]:
                # An engine holds adapters of a few policies at a time; this one is not asked any more.
                async with AdminClient(started.gateway, key) as watcher:
                    await watcher.roll_back(planned.policy)
        if options.keep:
            await self._stay(started, options.plan.runs[-1])

    async def _stay(self, started: Started, last: PlannedRun) -> None:
        say = self._board.say
        assert self.findings is not None
        say(in_one_line(self.findings.runs, self.findings.seconds))
        say(f"chat with what user {last.seed} has taught it: clawloop demo chat --data {self._options.data}")
        say(f"gateway      {started.gateway}/v1, model `policy`, key {self._keys[last]}")
        if started.temporal_ui is not None:
            say(f"Temporal UI  {started.temporal_ui}")
        say("Ctrl-C ends it; the data stays until the next demo")
        await asyncio.Event().wait()


def write_report(out: Path, findings: Findings) -> None:
    """Write `demo-report.json` and `demo-report.png`.

    Raises:
        SetupError: the folder cannot be written to.
    """
    try:
        # By a new name first: what was found before is not lost when this is cut short.
        written = out / "demo-report.json.new"
        written.write_text(as_json(findings.runs, findings.seconds), encoding="utf-8")
        written.replace(out / "demo-report.json")
        draw_chart(out / "demo-report.png", findings.runs)
    except OSError as error:
        raise SetupError(f"cannot write the report to {out}: {error.strerror}; choose a folder with --out") from error


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in ours.items() if not name.startswith(_NOT_INHERITED)}
    # For so small a model a second thread costs engine and trainer more than it gives.
    return {"OMP_NUM_THREADS": "1"} | inherited


def _model_in(folder: Path, model: Path) -> Path:
    """A copy with a telling name: engines call a model after its folder."""
    if not (model / "config.json").is_file():
        raise SetupError(f"the demo model is not in {model}: make it with `clawloop demo pretrain`")
    return Path(shutil.copytree(model, folder / "models" / BASE_MODEL))
