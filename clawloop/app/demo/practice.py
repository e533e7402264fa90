"""`clawloop demo run --environment NAME`: starts all parts and lets a toy practise in sandboxes.

While a policy practises, each of its versions is measured on held-out tasks: one attempt at each, in sandboxes as in
rollouts, recorded as side turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from clawloop.app.demo.admin_client import AcceptedVersion, AdminClient
from clawloop.app.demo.practice_report import Measured, PracticeReport, Totals, report_practice, with_measured, write
from clawloop.app.demo.run import DemoSetup, database_of
from clawloop.app.demo.toys import GROUP_SIZE, Toy
from clawloop.app.local.parts import Deployment
from clawloop.app.local.supervision.supervisor import Board
from clawloop.app.local.up import Prepare, Started
from clawloop.app.local.up import run as run_up
from clawloop.core.contracts.episodes import Ending, EpisodeState, EpisodeView, GroupState, RolloutsState
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import TrainingState
from clawloop.core.errors import SetupError, StoreUnavailable
from clawloop.core.ids import RolloutGroupId, new_episode_id, version_name
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Split
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from db.training.recipes import ensure_recipe

HELD_OUT_TASKS = 60
GROUPS_IN_FLIGHT = 4
# Once the model is nearly always right, most groups have equal rewards and give no sample.
BARREN_GROUPS = 200
_AT_A_TIME = 4
_POLL_SECONDS = 1.0
# The model solves a third of the tasks: if none of this many episodes is completed, something else is wrong.
_HOPELESS = 4 * GROUP_SIZE
# Groups in flight when a run ends: each has a few seconds to go.
_END_SECONDS = 180.0
# Engines keep a version for so long; measuring one took four minutes on a machine with a load of 35.
_WANTED = timedelta(minutes=15)
# Thirty versions take ten minutes where nothing else runs, and half an hour beside other work.
_REST_SECONDS = 2400.0
# An engine loads an adapter of a toy in a second, but looks for new ones after it has finished what it does.
_LOAD_SECONDS = 120.0

# All runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PracticeOptions:
    """
    Args:
        toy: what practises.
        seeds: of the runs, one after another; a run's first adapter depends on its seed.
        versions: a run ends when this version is active; minutes: or after this time.
    """

    toy: Toy
    seeds: Sequence[int]
    versions: int
    minutes: float
    setup: DemoSetup


async def practise(options: PracticeOptions, board: Board, prepare: Prepare) -> list[PracticeReport]:
    """Execute the runs and write the report; of an interrupted demo, the finished runs.

    Raises:
        SetupError: a part cannot start or fails, no sandboxes can be made here, or no episode is completed; all parts
            are stopped, and their logs stay.
    """
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    demo = _Practice(options, board, prepare, sandboxes)
    with options.setup.installation(options.toy.folder, options.toy.base_model) as up:
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
        """Satisfies `clawloop.app.local.up.Prepare`."""
        secrets = await self._prepare(deployment)
        database = database_of(deployment)
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
        """Satisfies `clawloop.app.local.up.Use`."""
        host, _, port = started.gateway.removeprefix("http://").rpartition(":")
        toy, deployment = self._options.toy, started.deployment
        runner = SandboxRunner(self._sandboxes, {toy.environment: toy.make()}, (host, int(port)))
        database = database_of(deployment)
        try:
            for seed in self._options.seeds:
                async with AdminClient(started.gateway, self._keys[seed]) as admin:
                    run = Run(
                        environment=toy.environment,
                        policy=_policy(seed),
                        seed=seed,
                        admin=admin,
                        loading=PostgresPublishingStore(database),
                        runner=runner,
                        key=self._keys[seed],
                        base_model=deployment.base_model,
                        board=self._board,
                        logs=deployment.data / "logs",
                    )
                    began = self._options.setup.began if seed == self._options.seeds[0] else time.time()
                    self.reports.append(await run.practise(began, self._options.versions, self._options.minutes))
                    write(self._options.setup.out / toy.report, self.reports)
                    self.reports[-1] = await run.measure_the_rest(self.reports[-1])
                    write(self._options.setup.out / toy.report, self.reports)
                    # An engine holds the adapters of only a few policies; this one is no longer needed.
                    await admin.roll_back(_policy(seed))
        finally:
            await database.close()


def _policy(seed: int) -> str:
    return f"practice-{seed}"


# One run --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """One run in progress.

    Args:
        loading: has engines load a version that is not the active one.
        key: of the policy, for chats and the admin API.
        logs: where those of all parts are.
    """

    environment: str
    policy: str
    seed: int
    admin: AdminClient
    loading: PostgresPublishingStore
    runner: SandboxRunner
    key: str
    base_model: str
    board: Board
    logs: Path
    measured: list[Measured] = field(default_factory=list)
    _began: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def practise(self, began: float, versions: int, minutes: float) -> PracticeReport:
        """Practise, and measure the versions for which there is time meanwhile.

        Args:
            began: when setting up for this run began, as `time.time`.
            versions, minutes: the run ends when this version is active, or after this time.

        Raises:
            SetupError: no episode is completed, or a part fails.
        """
        await self._measure(AcceptedVersion(0, self._began), after_run=False)
        if not self.measured:
            raise SetupError(f"no engine served {self.base_model} while it was measured: see the logs in {self.logs}")
        seconds_setup = time.time() - began
        self._began = datetime.now(UTC)
        await self.admin.start_rollouts(
            self.policy, self.environment, size=GROUP_SIZE, groups=GROUPS_IN_FLIGHT, barren=BARREN_GROUPS
        )
        stopped = await self._until_practised(versions, minutes)
        seconds = self._seconds_to(datetime.now(UTC))
        await self.admin.pause_rollouts(self.policy, "the demo's run is over")
        totals = await self._totals()
        return report_practice(
            self.seed, self.measured, totals, seconds=seconds, seconds_setup=seconds_setup, stopped=stopped
        )

    async def measure_the_rest(self, report: PracticeReport) -> PracticeReport:
        """Measure the versions for which there was no time: their files are kept, and engines load them again."""
        done = {row.version for row in self.measured}
        left = [version for version in await self.admin.accepted_versions(self.policy) if version.n not in done]
        deadline = time.monotonic() + _REST_SECONDS
        for version in left:
            if time.monotonic() > deadline:
                self.board.say(f"seed {self.seed}, version {version.n:3d}: not measured, there is no time left")
                continue
            await self._measure(version, after_run=True)
        return with_measured(report, sorted(self.measured, key=lambda row: row.version))

    async def _until_practised(self, versions: int, minutes: float) -> str | None:
        """Measure each version as it becomes active, or the newest of those meanwhile; returns why it ended early."""
        looked_at = 0
        while True:
            status = await self.admin.training_status(self.policy)
            if status.version >= versions:
                return None
            if self._seconds_to(datetime.now(UTC)) > 60 * minutes:
                return f"{minutes:g} minutes are over"
            if status.version != looked_at:
                looked_at = status.version
                accepted = await self.admin.accepted_versions(self.policy)
                for version in (one for one in accepted if one.n == looked_at):
                    await self._measure(version, after_run=False)
                continue
            if status.state is TrainingState.PAUSED:
                return status.reason
            rollouts = await self.admin.rollouts(self.policy)
            if rollouts.state is RolloutsState.PAUSED:
                return rollouts.reason
            if not status.version and (why := none_completed(await self.admin.episodes(self.policy))):
                raise SetupError(f"{why}: see the logs in {self.logs}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _measure(self, version: AcceptedVersion, *, after_run: bool) -> None:
        if version.n:
            # Engines may have the version even if PostgreSQL is away.
            with suppress(StoreUnavailable):
                await self.loading.want_for(self.policy, [version.n], _WANTED)
        found = await self._held_out(version.n)
        if found is None:
            self.board.say(f"seed {self.seed}, version {version.n:3d}: no engine has it, so it is not measured")
            return
        row = Measured(
            version=version.n,
            success=found.right / found.attempts if found.attempts else 0.0,
            attempts=found.attempts,
            unknown=found.unknown,
            episodes=sum(
                episode.ending is not None and episode.ended_at is not None and episode.ended_at <= version.created_at
                for episode in await self.admin.episodes(self.policy)
            ),
            seconds=round(max(0.0, self._seconds_to(version.created_at)), 1),
            after_run=after_run,
        )
        self.measured.append(row)
        unknown = f", {row.unknown} without a reward" if row.unknown else ""
        late = ", measured after the run" if after_run else ""
        self.board.say(
            f"seed {self.seed}, version {version.n:3d}: success {row.success:4.0%} of {row.attempts} held-out tasks"
            f"{unknown}; {row.episodes} episodes, {row.seconds:.0f} s{late}"
        )

    async def _held_out(self, version: int) -> HeldOut | None:
        """The version's result on held-out tasks; None if no engine has the version."""
        model = version_name(self.policy, version, self.base_model)

        async def is_served() -> bool:
            return model in await self.admin.served_models()

        deadline = time.monotonic() + _LOAD_SECONDS
        while not await is_served():
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        measuring = measure_held_out(
            self.runner, self.environment, HELD_OUT_TASKS, key=self.key, model=model, at_a_time=_AT_A_TIME
        )
        return await while_served(measuring, is_served, _POLL_SECONDS)

    async def _totals(self) -> Totals:
        """Totals of the run's episodes and groups, once all have ended."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            if not (await self.admin.rollouts(self.policy)).in_flight:
                break
            await asyncio.sleep(_POLL_SECONDS)
        episodes = await self.admin.episodes(self.policy)
        groups = [group for group in await self.admin.groups(self.policy) if group.state is not GroupState.OPEN]
        rewards: dict[RolloutGroupId, set[float]] = {group.id: set() for group in groups}
        for episode in episodes:
            if episode.reward is not None and episode.group in rewards:
                rewards[episode.group].add(episode.reward)
        return Totals(
            endings=Counter(episode.ending for episode in episodes if episode.ending is not None),
            lost=sum(episode.state == EpisodeState.ABANDONED for episode in episodes),
            groups=len(groups),
            groups_constant=sum(len(values) < 2 for values in rewards.values()),
        )

    def _seconds_to(self, moment: datetime) -> float:
        return (moment - self._began).total_seconds()


def none_completed(episodes: Sequence[EpisodeView]) -> str | None:
    """A message if no episode was completed, e.g. because an engine refuses the gateway's requests; else None."""
    endings = Counter(episode.ending for episode in episodes if episode.ending is not None)
    if endings.total() < _HOPELESS or endings[Ending.COMPLETED]:
        return None
    most = endings.most_common(1)[0][0]
    return f"none of the first {endings.total()} episodes was completed, most ended as {most}"


# Held-out tasks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldOut:
    """
    Args:
        right: attempts with reward 1 or more.
        attempts: with a reward.
        unknown: attempts without a reward.
    """

    right: int
    attempts: int
    unknown: int


async def while_served(
    measuring: Awaitable[HeldOut], is_served: Callable[[], Awaitable[bool]], look_seconds: float
) -> HeldOut | None:
    """The measurement; None if engines unloaded the version meanwhile, because newer versions came."""
    task = asyncio.ensure_future(measuring)
    try:
        while not (await asyncio.wait({task}, timeout=look_seconds))[0]:
            if not await is_served():
                return None
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def measure_held_out(
    runner: SandboxRunner, environment: str, tasks: int, *, key: str, model: str, at_a_time: int
) -> HeldOut:
    """
    Args:
        tasks: the first so many held-out tasks.
        key: of the policy, for chats.
        model: the served name of the version.
        at_a_time: sandboxes at once.
    """
    slots = asyncio.Semaphore(at_a_time)
    # Side turns are recorded and never trained.
    fields = {"model": model, "turn_type": "side", "temperature": 1.0, "top_p": 1.0, "top_k": -1}

    async def attempt(number: int) -> float | None:
        async with slots:
            task, episode = f"{Split.TEST}-{number}", new_episode_id()
            run = await runner.run_agent(environment, task, episode, key, {"REQUEST_FIELDS": json.dumps(fields)})
            if run.ending is Ending.INFRASTRUCTURE:
                return None
            return (await runner.verify(environment, task, episode, run.artifact))[0]

    rewards = await asyncio.gather(*(attempt(number) for number in range(tasks)))
    known = [reward for reward in rewards if reward is not None]
    return HeldOut(sum(reward >= 1 for reward in known), len(known), len(rewards) - len(known))
