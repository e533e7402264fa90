"""Rollout groups with a scripted runner in place of sandboxes, for tests of their workflows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.episodes import EpisodeLedgerActivities
from activities.judging.episode_votes import EpisodeJudged, JudgeEpisode
from activities.notify import TrainingNotifier
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.episodes import AgentRun, Ending, GroupResult, GroupState, NewGroup, NextGroups
from clawloop.core.episodes.running import EnvironmentActivities, environment_queue
from clawloop.core.errors import JudgeRefused, TaskUnusable
from clawloop.core.ids import EpisodeId, RolloutGroupId, new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from tests.fakes.notifier import NoWork
from tests.workflows.conftest import IDLE
from workflows import names
from workflows.rollouts import DEADLINE, RolloutGroupWorkflow, RolloutsWorkflow


class ScriptedRunner:
    """Satisfies `EpisodeRunner`.

    Attributes:
        environment: the only one that it knows.
        run: what becomes of the episode at a place, at its n-th attempt.
        verdict: the same for the verifier's n-th call on an episode.
        may_run: agents wait for it; may_verify: verifiers.
        unusable: why its tasks are not played; empty: they are.
    """

    def __init__(self, store: FakeEpisodeStore) -> None:
        self.store = store
        self.environment = "tool-call"
        self.run: Callable[[int, int], AgentRun] = lambda place, attempt: AgentRun(Ending.COMPLETED, "", b"left")
        self.verdict: Callable[[int, int], tuple[float | None, str]] = lambda place, n: (float(place % 2), "")
        self.may_run, self.may_verify = asyncio.Event(), asyncio.Event()
        self.may_run.set()
        self.may_verify.set()
        self.votes = ScriptedVotes(store)
        self.ran: list[tuple[int, int]] = []
        self.unusable = ""
        self.verified: dict[EpisodeId, int] = {}

    async def require_usable(self, environment: str, task_id: str) -> None:
        if self.unusable:
            raise TaskUnusable(self.unusable)

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        assert (environment, task_id, key) == (self.environment, "train-0", f"ce_{episode.hex}.fake")
        begun = self.store.by_id[episode].begun
        self.ran.append((begun.place, begun.attempt))
        await self.may_run.wait()
        return self.run(begun.place, begun.attempt)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        assert artifact == b"left"
        await self.may_verify.wait()
        self.verified[episode] = self.verified.get(episode, 0) + 1
        return self.verdict(self.store.by_id[episode].begun.place, self.verified[episode])


class Artifacts:
    async def store(self, artifact: bytes) -> str:
        return artifact.decode()

    async def load(self, sha256: str) -> bytes:
        return sha256.encode()


class ScriptedVotes:
    """Stands in for `EpisodeJudgingActivities`.

    Attributes:
        judged: places, in the order they were asked for.
        refused: places whose judge refuses.
    """

    def __init__(self, store: FakeEpisodeStore) -> None:
        self.store = store
        self.judged: list[int] = []
        self.refused: set[int] = set()

    @activity.defn(name="judge_episode")
    async def judge_episode(self, request: JudgeEpisode) -> EpisodeJudged:
        place = self.store.by_id[request.episode].begun.place
        self.judged.append(place)
        if place in self.refused:
            raise JudgeRefused("404")
        return EpisodeJudged(turns=2, judged=1)


class TwoGroups:
    """Two groups, then a pause.

    Attributes:
        has_room: the second group may start; the first always may.
    """

    def __init__(self, store: FakeEpisodeStore) -> None:
        self.store = store
        self.groups: list[RolloutGroupId] = []
        self.has_room: Callable[[], bool] = lambda: True

    async def next_groups(self, policy: str) -> NextGroups:
        if not self.groups or (len(self.groups) < 2 and self.has_room()):
            group = NewGroup(new_rollout_group_id(), policy, "tool-call", "train-0", 2)
            await self.store.make_group(group)
            self.groups.append(group.id)
        still_open = [group for group in self.groups if self.store.state_of(group) is GroupState.OPEN]
        return NextGroups(bool(still_open), still_open, "two groups")


@asynccontextmanager
async def working(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> AsyncIterator[TwoGroups]:
    async with orchestrating(client, store, runner) as rollouts, environment_worker(client, store, runner):
        yield rollouts


def environment_worker(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> Worker:
    environment = EnvironmentActivities(store.key_of, runner, Artifacts())
    queue = environment_queue(runner.environment)
    return Worker(client, task_queue=queue, activities=[environment.run_episode, environment.verify_episode])


@asynccontextmanager
async def orchestrating(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> AsyncIterator[TwoGroups]:
    """All workers but the environment's."""
    rollouts = TwoGroups(store)
    notifier = TemporalNotifier(client, IDLE)
    ledger = EpisodeLedgerActivities(store, rollouts.next_groups, TrainingNotifier(NoWork(), notifier), notifier)
    local = ledger.where_workflows_run
    calls = [*local, ledger.settle_group]
    async with (
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=[RolloutsWorkflow, RolloutGroupWorkflow],
            activities=local,
            no_remote_activities=True,
        ),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=calls),
        Worker(client, task_queue=names.JUDGE_QUEUE, activities=[runner.votes.judge_episode]),
    ):
        yield rollouts


async def start_group(client: Client, group: RolloutGroupId) -> WorkflowHandle[Any, GroupResult]:
    return await client.start_workflow(
        RolloutGroupWorkflow.run,
        group,
        id=names.rollout_group_workflow_id(group),
        task_queue=names.WORKFLOW_QUEUE,
    )


async def run_group(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner, size: int) -> GroupResult:
    return (await run_group_with_timers(client, store, runner, size))[0]


async def run_group_with_timers(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner, size: int
) -> tuple[GroupResult, list[timedelta]]:
    """The result, and how long each timer was that the group set beside its deadline's, the shortest first."""
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", size)
    await store.make_group(group)
    async with working(client, store, runner):
        handle = await start_group(client, group.id)
        result = await handle.result()
        events = [event async for event in handle.fetch_history_events()]
    timers = [event.timer_started_event_attributes.start_to_fire_timeout.ToTimedelta() for event in events]
    return result, sorted(timer for timer in timers if timedelta() < timer < DEADLINE)
