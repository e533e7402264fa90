"""Rollout groups on Temporal's real development server, with a scripted runner in place of sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from activities.episodes.ledger import KEY_LIFETIME, EpisodeLedgerActivities
from activities.episodes.running import EnvironmentActivities
from clawloop.contracts.episodes import (
    AgentRun,
    Ending,
    EpisodeEnd,
    EpisodeState,
    GroupResult,
    GroupState,
    NewGroup,
    NextGroups,
)
from clawloop.errors import RecordUnusable, SandboxFailed
from clawloop.ids import EpisodeId, RolloutGroupId, new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from workflows import names
from workflows.rollout_group import RolloutGroupWorkflow
from workflows.rollouts import RolloutsWorkflow
from workflows.state import PolicyRollouts


class ScriptedRunner:
    """Satisfies `EpisodeRunner`.

    Attributes:
        run: what becomes of the episode at a place, at its n-th attempt.
        verdict: the same for the verifier's n-th call on an episode.
    """

    def __init__(self, store: FakeEpisodeStore) -> None:
        self.store = store
        self.run: Callable[[int, int], AgentRun] = lambda place, attempt: AgentRun(Ending.COMPLETED, "", b"left")
        self.verdict: Callable[[int, int], tuple[float | None, str]] = lambda place, n: (float(place % 2), "")
        self.ran: list[tuple[int, int]] = []
        self.verified: dict[EpisodeId, int] = {}

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        assert (environment, task_id, key) == ("tool-call", "train-0", f"ce_{episode.hex}.fake")
        begun = self.store.by_id[episode].begun
        self.ran.append((begun.place, begun.attempt))
        return self.run(begun.place, begun.attempt)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        assert artifact == b"left"
        self.verified[episode] = self.verified.get(episode, 0) + 1
        return self.verdict(self.store.by_id[episode].begun.place, self.verified[episode])


class Artifacts:
    async def store(self, artifact: bytes) -> str:
        return artifact.decode()

    async def load(self, sha256: str) -> bytes:
        return sha256.encode()


class NoBatch:
    async def notify(self, policy: str | None) -> None:
        assert policy is None


class TwoGroups:
    """Satisfies `RolloutStore`: two groups, then a pause."""

    def __init__(self, store: FakeEpisodeStore) -> None:
        self.store = store
        self.groups: list[RolloutGroupId] = []

    async def next_groups(self, policy: str) -> NextGroups:
        if len(self.groups) < 2:
            group = NewGroup(new_rollout_group_id(), policy, "tool-call", "train-0", 2)
            await self.store.make_group(group)
            self.groups.append(group.id)
        still_open = [group for group in self.groups if self.store.state_of(group) is GroupState.OPEN]
        return NextGroups(bool(still_open), still_open, "two groups")


@asynccontextmanager
async def working(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> AsyncIterator[TwoGroups]:
    rollouts = TwoGroups(store)
    ledger = EpisodeLedgerActivities(store, rollouts, NoBatch())
    environment = EnvironmentActivities(store, runner, Artifacts())
    calls: list[Callable[..., Any]] = [
        ledger.read_group_task,
        ledger.begin_episode,
        ledger.end_episode,
        ledger.score_episode,
        ledger.settle_group,
        ledger.next_groups,
    ]
    queue = names.environment_queue("tool-call")
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[RolloutsWorkflow, RolloutGroupWorkflow]),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=calls),
        Worker(client, task_queue=queue, activities=[environment.run_episode, environment.verify_episode]),
    ):
        yield rollouts


async def run_group(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner, size: int) -> GroupResult:
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", size)
    await store.make_group(group)
    async with working(client, store, runner):
        return await client.execute_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )


async def test_each_episode_is_run_once_and_verified(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    result = await run_group(client, store, runner, 4)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.SETTLED, 4, 0.5)
    assert sorted(runner.ran) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert set(runner.verified.values()) == {1}


async def test_infrastructure_fails_twice_more_at_most_and_each_attempt_is_another_episode(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)

    def run(place: int, attempt: int) -> AgentRun:
        if place == 0:
            raise SandboxFailed("bubblewrap did not start")
        if place == 1 and attempt < 3:
            return AgentRun(Ending.INFRASTRUCTURE, "exit code 75", b"left")
        return AgentRun(Ending.AGENT_ERROR if place == 2 else Ending.COMPLETED, "", b"left")

    runner.run = run
    result = await run_group(client, store, runner, 4)
    assert (result.state, result.scored) == (GroupState.SETTLED, 3)
    assert sorted(runner.ran) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    abandoned = [episode for episode in store.by_id.values() if episode.state is EpisodeState.ABANDONED]
    assert len(abandoned) == 5
    assert {episode.reason for episode in abandoned if episode.begun.place == 0} == {"bubblewrap did not start"}


async def test_a_workflow_that_begins_again_runs_no_episode_twice(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 4)
    await store.make_group(group)
    scored, ended, lost, _ = [await store.begin_episode(group.id, place, 1, KEY_LIFETIME) for place in range(4)]
    await store.end_episode(EpisodeEnd(scored.id, Ending.COMPLETED))
    await store.score_episode(scored.id, 1.0, "")
    await store.end_episode(EpisodeEnd(ended.id, Ending.COMPLETED, artifact_sha256="left"))
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE))
    async with working(client, store, runner):
        result = await client.execute_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )
    assert sorted(runner.ran) == [(2, 2), (3, 1)]
    assert (result.scored, result.mean_reward) == (4, 0.75)  # 1, and by their places 1, 0, 1


async def test_a_verifier_is_repeated_alone_and_its_failure_is_no_reward(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)

    def verdict(place: int, n: int) -> tuple[float | None, str]:
        if place == 0 and n == 1:
            raise SandboxFailed("bubblewrap did not start")
        if place == 1:
            raise RecordUnusable("no artifact")
        return float(place == 0), ""

    runner.verdict = verdict
    result = await run_group(client, store, runner, 3)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.SETTLED, 2, 0.5)
    assert sorted(runner.ran) == [(0, 1), (1, 1), (2, 1)]
    assert sorted(runner.verified.values()) == [1, 1, 2]
    unscored = [episode for episode in store.by_id.values() if episode.state is EpisodeState.UNSCORED]
    assert [(episode.begun.place, episode.reason) for episode in unscored] == [(1, "not verified: RecordUnusable")]


async def test_rollouts_start_groups_until_they_are_paused(client: Client) -> None:
    store = FakeEpisodeStore()
    async with working(client, store, ScriptedRunner(store)) as rollouts:
        await client.execute_workflow(
            RolloutsWorkflow.run,
            PolicyRollouts(policy="default"),
            id=names.rollouts_workflow_id(str(new_rollout_group_id())),
            task_queue=names.WORKFLOW_QUEUE,
        )
    assert [store.state_of(group) for group in rollouts.groups] == [GroupState.SETTLED] * 2
