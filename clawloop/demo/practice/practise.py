"""`clawloop demo run --environment NAME`: starts all parts, lets the toy model practise in sandboxes and measures
each version on held-out tasks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawloop.contracts.episodes import Ending, EpisodeState
from clawloop.contracts.serving import Scope
from clawloop.contracts.training import TrainingState
from clawloop.demo.admin_client import AdminClient, EpisodeSummary
from clawloop.demo.demo_folder import demo_folder
from clawloop.demo.practice.measure import measure_held_out, while_served
from clawloop.demo.practice.recipe import GROUP_SIZE
from clawloop.demo.practice.report import Measured, PracticeReport, Totals, report_practice, write
from clawloop.demo.practice.toy import Toy
from clawloop.demo.run import model_in, parts_environment
from clawloop.environments.runner import SandboxRunner
from clawloop.errors import SetupError
from clawloop.ids import version_name
from clawloop.local.checks import require_disk, require_folder
from clawloop.local.model_layout import ModelOptions
from clawloop.local.parts import Deployment
from clawloop.local.plan import UpOptions
from clawloop.local.supervision.status import Board
from clawloop.local.up import Prepare, Started
from clawloop.local.up import run as run_up
from clawloop.processes.database import codec_of
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from db.database import BACKGROUND_LIMIT, Database
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe

HELD_OUT_TASKS = 60
GROUPS_IN_FLIGHT = 4
# Once the model is nearly always right, most groups have equal rewards and give no sample.
BARREN_GROUPS = 200
_CONTEXT_TOKENS = 2048
_AT_A_TIME = 4
_POLL_SECONDS = 1.0
# So many episodes of the model that solves a third of the tasks, none completed: something else is wrong.
_HOPELESS = 4 * GROUP_SIZE
# Groups in flight when a run ends: each has a few seconds to go.
_END_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class PracticeOptions:
    """
    Args:
        toy: what practises.
        seeds: of the runs, one after another; a run's first adapter depends on its seed.
        versions: a run ends when this version was measured; minutes: or after this time.
        data: the demo uses the subfolder `demo`.
        out: folder of the report.
        began: when setup began, as `time.time`.
    """

    toy: Toy
    seeds: Sequence[int]
    versions: int
    minutes: float
    data: Path
    out: Path
    environment: Mapping[str, str]
    began: float = field(default_factory=time.time)
    port: int = 0
    temporal_port: int = 0
    temporal_ui_port: int = 0
    engine_port: int = 0


async def practise(options: PracticeOptions, board: Board, prepare: Prepare) -> list[PracticeReport]:
    """Execute the runs and write the report; of an interrupted demo, the finished runs.

    Raises:
        SetupError: a part cannot start or fails, no sandboxes can be made here, or no episode is completed; all parts
            are stopped, and their logs stay.
    """
    require_folder(options.out)
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    demo = _Practice(options, board, prepare, sandboxes)
    with demo_folder(options.data, keep=False) as folder:
        require_disk(folder)
        up = UpOptions(
            data=folder,
            environment=parts_environment(options.environment),
            port=options.port,
            gateways=1,
            temporal_port=options.temporal_port,
            temporal_ui_port=options.temporal_ui_port,
            engine_port=options.engine_port,
            model=model_in(folder, options.toy.folder, options.toy.base_model),
            models=ModelOptions(dtype="float32", max_model_len=_CONTEXT_TOKENS),
        )
        await run_up(up, board, demo.ready, use=demo.use)
    return demo.reports


class _Practice:
    def __init__(self, options: PracticeOptions, board: Board, prepare: Prepare, sandboxes: Bubblewrap) -> None:
        self._options = options
        self._board = board
        self._prepare = prepare
        self._sandboxes = sandboxes
        self._keys: dict[int, str] = {}
        self.reports: list[PracticeReport] = []

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        """Satisfies `clawloop.local.up.Prepare`."""
        secrets = await self._prepare(deployment)
        database = Database(deployment.database_url, BACKGROUND_LIMIT, codec_of(deployment.encryption_key_file))
        try:
            store = PostgresKeyStore(database)
            for seed in self._options.seeds:
                await ensure_policy(database, _policy(seed), deployment.base_model, [])
                await ensure_recipe(database, _policy(seed), self._options.toy.recipe())
                _, self._keys[seed] = await store.create_key(_policy(seed), frozenset(Scope), name=f"demo, seed {seed}")
        finally:
            await database.close()
        return secrets

    async def use(self, started: Started) -> None:
        """Satisfies `clawloop.local.up.Use`."""
        host, _, port = started.gateway.removeprefix("http://").rpartition(":")
        toy = self._options.toy
        runner = SandboxRunner(self._sandboxes, {toy.environment: toy.make()}, (host, int(port)))
        for seed in self._options.seeds:
            async with AdminClient(started.gateway, self._keys[seed]) as admin:
                run = _Run(
                    toy.environment,
                    seed,
                    admin,
                    runner,
                    self._keys[seed],
                    started.deployment.base_model,
                    self._board,
                    started.deployment.data,
                )
                self.reports.append(await run.execute(self._options))
                write(self._options.out / toy.report, self.reports)
                # An engine holds the adapters of only a few policies; this one is no longer needed.
                await admin.roll_back(_policy(seed))


@dataclass
class _Run:
    """One run in progress."""

    environment: str
    seed: int
    admin: AdminClient
    runner: SandboxRunner
    key: str
    base_model: str
    board: Board
    folder: Path
    measured: list[Measured] = field(default_factory=list)
    _began: float = 0.0

    async def execute(self, options: PracticeOptions) -> PracticeReport:
        self._began = time.monotonic()
        await self._measure(0)
        seconds_setup = time.time() - options.began if self.seed == options.seeds[0] else self._seconds()
        self._began = time.monotonic()
        await self.admin.start_rollouts(
            _policy(self.seed), self.environment, size=GROUP_SIZE, groups=GROUPS_IN_FLIGHT, barren=BARREN_GROUPS
        )
        stopped = await self._until_practised(options)
        seconds = self._seconds()
        await self.admin.pause_rollouts(_policy(self.seed), "the demo's run is over")
        totals = await self._totals()
        return report_practice(
            self.seed, self.measured, totals, seconds=seconds, seconds_setup=seconds_setup, stopped=stopped
        )

    async def _until_practised(self, options: PracticeOptions) -> str | None:
        """Measure each version as it becomes active, or the newest of those meanwhile; returns why it ended early."""
        while self.measured[-1].version < options.versions:
            if self._seconds() > 60 * options.minutes:
                return f"{options.minutes:g} minutes are over"
            status = await self.admin.training_status(_policy(self.seed))
            if status.version != self.measured[-1].version:
                await self._measure(status.version)
                continue
            if status.state is TrainingState.PAUSED:
                return status.reason
            rollouts = await self.admin.rollouts(_policy(self.seed))
            if rollouts.paused:
                return rollouts.reason
            if not status.version and (why := none_completed(await self.admin.episodes(_policy(self.seed)))):
                raise SetupError(f"{why}: see the logs in {self.folder / 'logs'}")
            await asyncio.sleep(_POLL_SECONDS)
        return None

    async def _measure(self, version: int) -> None:
        model = version_name(_policy(self.seed), version, self.base_model)

        async def is_served() -> bool:
            return model in await self.admin.served_models()

        measuring = measure_held_out(
            self.runner, self.environment, HELD_OUT_TASKS, key=self.key, model=model, at_a_time=_AT_A_TIME
        )
        found = await while_served(measuring, is_served, _POLL_SECONDS)
        if found is None:
            self.board.say(f"seed {self.seed}, version {version:3d}: gone before it was measured")
            return
        finished = [episode for episode in await self.admin.episodes(_policy(self.seed)) if episode.ending is not None]
        success = found.right / found.attempts if found.attempts else 0.0
        row = Measured(version, success, found.attempts, found.unknown, len(finished), round(self._seconds(), 1))
        self.measured.append(row)
        unknown = f", {row.unknown} without a reward" if row.unknown else ""
        self.board.say(
            f"seed {self.seed}, version {version:3d}: success {success:4.0%} of {row.attempts} held-out tasks{unknown};"
            f" {row.episodes} episodes, {row.seconds:.0f} s"
        )

    async def _totals(self) -> Totals:
        """What became of the run's episodes, once all have ended."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            if not (await self.admin.rollouts(_policy(self.seed))).in_flight:
                break
            await asyncio.sleep(_POLL_SECONDS)
        episodes = await self.admin.episodes(_policy(self.seed))
        groups = [group for group in await self.admin.groups(_policy(self.seed)) if group.state != "open"]
        rewards: dict[str, set[float]] = {group.id: set() for group in groups}
        for episode in episodes:
            if episode.reward is not None and episode.group in rewards:
                rewards[episode.group].add(episode.reward)
        return Totals(
            endings=Counter(episode.ending for episode in episodes if episode.ending is not None),
            lost=sum(episode.state == EpisodeState.ABANDONED for episode in episodes),
            groups=len(groups),
            groups_constant=sum(len(values) < 2 for values in rewards.values()),
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def none_completed(episodes: Sequence[EpisodeSummary]) -> str | None:
    """Why there is nothing to learn from, e.g. because an engine refuses what the gateway sends; None if there is."""
    endings = Counter(episode.ending for episode in episodes if episode.ending is not None)
    if endings.total() < _HOPELESS or endings[Ending.COMPLETED]:
        return None
    most = endings.most_common(1)[0][0]
    return f"none of the first {endings.total()} episodes was completed, most ended as {most}"


def _policy(seed: int) -> str:
    return f"practice-{seed}"
