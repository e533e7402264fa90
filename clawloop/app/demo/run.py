"""`clawloop demo run`: starts all parts on this machine, executes the planned runs in turn and writes the report."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.chart import draw_chart
from clawloop.app.demo.demo_folder import Address, demo_folder, write_address
from clawloop.app.demo.experiment import DemoBoard, PolicyAccess, run_experiment
from clawloop.app.demo.faults import FaultInjector
from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.recipes import demo_recipe
from clawloop.app.demo.report import Evaluation, RunReport, RunTotals, report_run
from clawloop.app.demo.report_formats import as_json, summary_line, taste_lines
from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.demo.world import demo_probes
from clawloop.app.local.checks import require_disk, require_folder
from clawloop.app.local.model_layout import ModelOptions, widest_dtype
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
from clawloop.app.local.supervision.supervisor import Supervisor
from clawloop.app.local.up import Prepare, Started
from clawloop.app.local.up import run as run_up
from clawloop.app.processes.database import codec_of
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import SetupError, StoreUnavailable
from clawloop.operations.probes import MOST_PROBES
from db.database import BACKGROUND_LIMIT, Database
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.policies import PostgresMeasurements
from db.training.probes import PostgresProbeStore
from db.training.recipes import ensure_recipe

BASE_MODEL = "clawloop-demo"
# The longest session has eight requests of about a hundred tokens.
_CONTEXT_TOKENS = 2048
# Settings of the operator's own installation do not apply to the demo.
_NOT_INHERITED = ("CLAWLOOP_", "DATABASE_URL", "TEMPORAL_ADDRESS")


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """Folders, ports and environment of a demo.

    Args:
        data: the demo uses the subfolder `demo`.
        out: folder of the report.
        began: when setup began, as `time.time`.
        port, temporal_port, temporal_ui_port, engine_port: 0 for any free port.
    """

    data: Path
    out: Path
    environment: Mapping[str, str]
    began: float = field(default_factory=time.time)
    port: int = 0
    temporal_port: int = 0
    temporal_ui_port: int = 0
    engine_port: int = 0

    @contextmanager
    def installation(
        self, model: Path, name: str | None, *, keep: bool = False, gateways: int = 1, sandboxes: bool = True
    ) -> Iterator[UpOptions]:
        """The options of `clawloop up` for an installation of the demo's own, in an emptied folder.

        Args:
            model: the folder of the model.
            name: of a toy, which is copied, for engines to serve it by this name; None: it is no toy.
            keep: leave the data.

        Raises:
            SetupError: the report or the data cannot be written, or there is no model.
        """
        require_folder(self.out)
        with demo_folder(self.data, keep=keep) as folder:
            require_disk(folder)  # before anything is written
            yield UpOptions(
                data=folder,
                environment=parts_environment(self.environment, toy=name is not None),
                port=self.port,
                gateways=gateways,
                temporal_port=self.temporal_port,
                temporal_ui_port=self.temporal_ui_port,
                engine_port=self.engine_port,
                model=model if name is None else model_in(folder, model, name),
                models=ModelOptions(dtype=widest_dtype(), max_model_len=_CONTEXT_TOKENS),
                sandboxes=sandboxes,
            )


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `clawloop demo run`.

    Args:
        keep: leave all parts running afterwards and keep the data.
        faults: kill parts while the runs last.
        model: folder of the model that the plan names; None: the toy.
    """

    plan: Plan
    setup: DemoSetup
    keep: bool = False
    faults: bool = False
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoResults:
    """The results of a demo.

    Args:
        seconds: total, with setup and without shutdown.
    """

    runs: Sequence[RunReport]
    seconds: float


async def run(options: DemoOptions, board: DemoBoard, prepare: Prepare) -> DemoResults | None:
    """Execute the plan and write the report. If interrupted, return fewer runs, or None if no run has finished.

    Args:
        prepare: prepares the database, as for `clawloop up`.

    Raises:
        SetupError: a part cannot start or fails; all parts are stopped.
    """
    demo = _Demo(options, board, prepare)
    # One gateway is enough for one user; two answer while one is killed.
    gateways = 2 if options.faults else 1
    model, name = (CHAT_MODEL, BASE_MODEL) if options.model is None else (options.model, None)
    with options.setup.installation(model, name, keep=options.keep, gateways=gateways, sandboxes=False) as up:
        await run_up(up, _PartStatusBoard(board), demo.ready, use=demo.use)
    return demo.results


class _PartStatusBoard:
    """Passes the status of parts on to the demo's board and drops the lines that `clawloop up` prints for operators."""

    def __init__(self, board: DemoBoard) -> None:
        self.changed = board.changed

    def say(self, line: str) -> None:
        """Discard the line."""


class _Demo:
    def __init__(self, options: DemoOptions, board: DemoBoard, prepare: Prepare) -> None:
        self._options = options
        self._board = board
        self._prepare = prepare
        self._keys: dict[PlannedRun, str] = {}
        self.results: DemoResults | None = None

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        """Satisfies `clawloop.app.local.up.Prepare`."""
        secrets = await self._prepare(deployment)
        self._keys = await _insert_policies(deployment, self._options.plan)
        return secrets

    async def use(self, started: Started) -> None:
        """Satisfies `clawloop.app.local.up.Use`."""
        options = self._options
        seconds_setup = time.time() - options.setup.began
        reports: list[RunReport] = []
        for planned in options.plan.runs:
            key = self._keys[planned]
            write_address(started.deployment.data, Address(started.gateway, key, key))
            self._board.say(f"see it learn: {started.gateway}/ui, key {key}")
            access = PolicyAccess(started.gateway, key, key, started.deployment.base_model)
            evaluated, totals = await self._run(planned, access, started.deployment, started.supervisor)
            if totals.stopped is not None:
                self._board.say(f"{totals.stopped}; the run ends early")
            reports.append(report_run(options.plan, planned, evaluated, totals, seconds_setup))
            for line in taste_lines(reports[-1]):
                self._board.say(line)
            # After each run, so that an interrupted demo has a report of the finished runs.
            self.results = DemoResults(tuple(reports), time.time() - options.setup.began)
            write_report(options.setup.out, self.results)
            if planned != options.plan.runs[-1]:
                # An engine holds the adapters of only a few policies; this one is no longer needed.
                async with AdminClient(started.gateway, key) as admin:
                    await admin.roll_back(planned.policy)
        if options.keep:
            await self._wait_until_interrupted(started, options.plan.runs[-1])

    async def _run(
        self, planned: PlannedRun, access: PolicyAccess, deployment: Deployment, supervisor: Supervisor
    ) -> tuple[list[Evaluation], RunTotals]:
        database = database_of(deployment)
        keep = partial(keep_match, PostgresMeasurements(database), planned, self._board)
        try:
            if not self._options.faults:
                return await run_experiment(planned, access, self._board, self._options.plan, keep)
            faults = FaultInjector(supervisor, self._board.say, planned.seed)
            async with faults.injecting():
                evaluated, totals = await run_experiment(planned, access, self._board, self._options.plan, keep)
            return evaluated, replace(totals, faults=faults.counts)
        finally:
            await database.close()

    async def _wait_until_interrupted(self, started: Started, last: PlannedRun) -> None:
        say = self._board.say
        assert self.results is not None
        say(summary_line(self.results.runs, self.results.seconds))
        say(f"chat with the policy of user {last.seed}: clawloop chat --data {self._options.setup.data}")
        say(f"gateway      {started.gateway}/v1, model `policy`, key {self._keys[last]}")
        say(f"page         {started.gateway}/ui")
        if started.temporal_ui is not None:
            say(f"Temporal UI  {started.temporal_ui}")
        say("Ctrl-C stops everything; the data stays until the next demo")
        await asyncio.Event().wait()


async def _insert_policies(deployment: Deployment, plan: Plan) -> dict[PlannedRun, str]:
    """Insert a policy with its recipe and the toy's probes for each run; return its API key, which has all scopes.

    A model is watched by the gate's general questions.

    A policy for each run lets all runs share one engine start without learning from each other.

    Raises:
        StoreUnavailable
    """
    database = database_of(deployment)
    keys: dict[PlannedRun, str] = {}
    try:
        store = PostgresKeyStore(database)
        for run in plan.runs:
            await ensure_policy(database, run.policy, deployment.base_model, [])
            await ensure_recipe(database, run.policy, demo_recipe(run.method))
            if plan.model is None:
                await PostgresProbeStore(database).add(run.policy, demo_probes(), MOST_PROBES)
            _, keys[run] = await store.create_key(run.policy, frozenset(Scope), name=f"demo, user {run.seed}")
    finally:
        await database.close()
    return keys


def database_of(deployment: Deployment) -> Database:
    return Database(deployment.database_url, BACKGROUND_LIMIT, codec_of(deployment.encryption_key_file))


async def keep_match(store: PostgresMeasurements, run: PlannedRun, board: DemoBoard, row: Evaluation) -> None:
    """Keep what an evaluation found where the page shows it."""
    try:
        await store.record(run.policy, row.version, row.match, row.requests)
    except StoreUnavailable as error:  # a fault may have killed it; the report has the figure
        board.say(f"the page does not show the match of version {row.version}: {error}")


def write_report(out: Path, results: DemoResults) -> None:
    """Write `demo-report.json` and `demo-report.png`.

    Raises:
        SetupError: the folder cannot be written to.
    """
    try:
        # Write to a new name first, so that an interrupted write keeps the previous report.
        new_file = out / "demo-report.json.new"
        new_file.write_text(as_json(results.runs, results.seconds), encoding="utf-8")
        new_file.replace(out / "demo-report.json")
        draw_chart(out / "demo-report.png", results.runs)
    except OSError as error:
        raise SetupError(f"cannot write the report to {out}: {error.strerror}; choose another folder: --out") from error


def parts_environment(environment: Mapping[str, str], *, toy: bool = True) -> dict[str, str]:
    """The environment of a demo's parts: without settings of the operator's own installation."""
    inherited = {name: value for name, value in environment.items() if not name.startswith(_NOT_INHERITED)}
    # For so small a model as a toy a second thread slows engine and trainer down.
    threads = {"OMP_NUM_THREADS": "1"} if toy else {}
    # One GPU is enough, too: more take longer to start.
    return threads | {"CUDA_VISIBLE_DEVICES": "0"} | inherited


def model_in(folder: Path, model: Path, name: str) -> Path:
    """Copy the model to a folder of this name and return it: engines name a model after its folder."""
    if not (model / "config.json").is_file():
        raise SetupError(f"the demo model is not in {model}: make it with `clawloop demo pretrain`")
    return Path(shutil.copytree(model, folder / "models" / name))
