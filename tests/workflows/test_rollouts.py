"""Rollout groups on Temporal's real development server, with a scripted runner in place of sandboxes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from clawloop.core.contracts.episodes import (
    AgentRun,
    Ending,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    GroupState,
    NewGroup,
)
from clawloop.core.episodes.keys import KEY_LIFETIME
from clawloop.core.errors import EpisodeUnusable, SandboxFailed
from clawloop.core.ids import new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from tests.workflows.conftest import SHORT_PAUSES
from tests.workflows.scripted_rollouts import ScriptedRunner, run_group, run_group_with_timers, working
from workflows import names
from workflows.activity_options import EPISODE_ATTEMPTS, LOCAL_STORE, ActivityOptions, run_in, verify_in
from workflows.rollouts import RolloutGroupWorkflow, RolloutsWorkflow
from workflows.state import PolicyRollouts


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
    result, timers = await run_group_with_timers(client, store, runner, 4)
    assert (result.state, result.scored) == (GroupState.SETTLED, 3)
    assert timers == sorted([*SHORT_PAUSES, *SHORT_PAUSES])
    assert sorted(runner.ran) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    abandoned = [episode for episode in store.by_id.values() if episode.state is EpisodeState.ABANDONED]
    assert len(abandoned) == 5
    assert {episode.reason for episode in abandoned if episode.begun.place == 0} == {"bubblewrap did not start"}


async def test_an_attempt_that_only_silence_ended_is_followed_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    runner.may_run.clear()
    limits = [timedelta(seconds=0.2)] * 2
    usual = run_in

    def hurried(environment: str) -> ActivityOptions:
        if limits:
            return {**usual(environment), "start_to_close_timeout": limits.pop()}
        runner.may_run.set()
        return usual(environment)

    monkeypatch.setattr("workflows.rollouts.run_in", hurried)
    result, timers = await run_group_with_timers(client, store, runner, 2)
    assert (result.state, result.scored, timers) == (GroupState.SETTLED, 2, [])
    assert {episode.reason for episode in store.by_id.values() if episode.begun.attempt == 1} == {"it took too long"}


def test_pauses_outlast_a_restart_for_agents_and_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = (timedelta(seconds=10), timedelta(seconds=60))
    monkeypatch.setattr("workflows.activity_options.EPISODE_PAUSES", pauses)
    policy = verify_in("tool-call")["retry_policy"]
    assert [policy.initial_interval, policy.initial_interval * policy.backoff_coefficient] == [*pauses]
    assert policy.maximum_interval is None
    assert policy.maximum_attempts == EPISODE_ATTEMPTS == len(pauses) + 1


async def test_a_workflow_that_begins_again_runs_no_episode_twice(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 4)
    await store.make_group(group)
    scored, ended, lost, _ = [await store.begin_episode(group.id, place, 1, KEY_LIFETIME) for place in range(4)]
    await store.end_episode(EpisodeEnd(scored.id, Ending.COMPLETED))
    await store.score_episode(EpisodeScore(scored.id, 1.0, ""))
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


async def test_a_task_that_cannot_be_used_is_not_played_and_not_tried_again(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    runner.unusable = "the task is not played: oracle has the reward 0, and must have 1"
    result = await run_group(client, store, runner, 2)
    assert (result.state, result.scored, runner.ran) == (GroupState.DROPPED, 0, [])
    assert [(one.begun.attempt, one.state) for one in store.by_id.values()] == [(1, EpisodeState.ABANDONED)] * 2
    assert runner.unusable in result.reason


async def test_a_verifier_is_repeated_alone_and_its_failure_is_no_reward(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)

    def verdict(place: int, n: int) -> tuple[float | None, str]:
        if place == 0 and n == 1:
            raise SandboxFailed("bubblewrap did not start")
        if place == 1:
            raise EpisodeUnusable("artifact 12ab is not in this worker's data folder")
        return float(place == 0), ""

    runner.verdict = verdict
    result = await run_group(client, store, runner, 3)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.SETTLED, 2, 0.5)
    assert sorted(runner.ran) == [(0, 1), (1, 1), (2, 1)]
    assert sorted(runner.verified.values()) == [1, 1, 2]
    unscored = [episode for episode in store.by_id.values() if episode.state is EpisodeState.UNSCORED]
    why = "not verified: artifact 12ab is not in this worker's data folder"
    assert [(episode.begun.place, episode.reason) for episode in unscored] == [(1, why)]


@pytest.mark.parametrize("came_with_the_run", [False, True])
async def test_a_reward_that_the_ledger_refuses_is_none_and_fails_no_group(
    client: Client, came_with_the_run: bool
) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)

    def verdict(place: int, n: int) -> tuple[float | None, str]:
        return (1e308 if place == 0 else place / 2), ""

    runner.verdict = verdict
    if came_with_the_run:
        runner.run = lambda place, attempt: AgentRun(Ending.COMPLETED, "", b"left", verdict(place, 1))
    result = await run_group(client, store, runner, 3)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.SETTLED, 2, 0.75)
    assert sorted(runner.ran) == [(0, 1), (1, 1), (2, 1)]
    refused = [episode for episode in store.by_id.values() if episode.state is EpisodeState.UNSCORED]
    why = "not recorded: reward 1e+308 is not between 0 and 1"
    assert [(episode.begun.place, episode.reason) for episode in refused] == [(0, why)]


async def test_votes_are_asked_for_where_they_count(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    await run_group(client, store, runner, 2)
    assert runner.votes.judged == []
    store.judged = True
    runner.votes.refused = {1}
    runner.verdict = lambda place, n: (None if place == 2 else float(place), "")
    result = await run_group(client, store, runner, 3)
    # An episode without a reward is not judged; a judge that refuses leaves the outcome alone.
    assert sorted(runner.votes.judged) == [0, 1]
    assert (result.state, result.scored) == (GroupState.SETTLED, 2)


async def test_a_group_that_fails_is_not_tried_again_at_once(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    store.refusals = 1000
    failed = EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_FAILED
    async with working(client, store, runner):
        handle = await client.start_workflow(
            RolloutsWorkflow.run,
            PolicyRollouts(policy="default"),
            id=names.rollouts_workflow_id(str(new_rollout_group_id())),
            task_queue=names.WORKFLOW_QUEUE,
        )
        after: list[EventType.ValueType] = []
        while EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED not in after:
            await asyncio.sleep(0.05)
            kinds = [event.event_type async for event in handle.fetch_history_events()]
            after = kinds[kinds.index(failed) :] if failed in kinds else []
        # What the workflow did about it stands behind its task: no look at once.
        assert EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED not in after
        await handle.terminate()


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


async def test_a_group_starts_while_the_one_before_waits_for_its_verifier(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not because rollouts look by themselves.
    monkeypatch.setattr("workflows.rollouts.LOOK_AGAIN", timedelta(hours=1))
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    runner.may_verify.clear()
    store.room = "default"
    async with working(client, store, runner) as rollouts:

        def has_room() -> bool:
            return any(episode.state is EpisodeState.ENDED for episode in store.by_id.values())

        rollouts.has_room = has_room
        running = await client.start_workflow(
            RolloutsWorkflow.run,
            PolicyRollouts(policy="default"),
            id=names.rollouts_workflow_id("default"),
            task_queue=names.WORKFLOW_QUEUE,
        )
        async with asyncio.timeout(120):
            while len(rollouts.groups) < 2:
                await asyncio.sleep(0.05)
        assert [store.state_of(group) for group in rollouts.groups] == [GroupState.OPEN] * 2
        runner.may_verify.set()
        await running.result()
    assert [store.state_of(group) for group in rollouts.groups] == [GroupState.SETTLED] * 2


async def test_a_verdict_that_came_with_the_run_is_asked_for_no_more(client: Client) -> None:
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    runner.run = lambda place, attempt: AgentRun(
        Ending.INFRASTRUCTURE if attempt == 1 and place == 0 else Ending.COMPLETED,
        "",
        b"left",
        None if attempt == 1 and place == 0 else (place / 2, ""),
    )
    result = await run_group(client, store, runner, 3)
    assert (result.scored, result.mean_reward) == (3, 0.5)
    assert sorted(runner.ran) == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert runner.verified == {}


async def test_a_call_that_fails_where_the_workflow_runs_waits_on_its_queue(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOCAL_STORE, "start_to_close_timeout", timedelta(seconds=60))  # on a busy machine
    store = FakeEpisodeStore()
    runner = ScriptedRunner(store)
    store.failures = 4
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 2)
    await store.make_group(group)
    async with working(client, store, runner):
        handle = await client.start_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )
        result = await handle.result()
        events = [event async for event in handle.fetch_history_events()]
    assert (result.state, result.scored) == (GroupState.SETTLED, 2)
    assert sorted(runner.ran) == [(0, 1), (1, 1)]
    scheduled = [event.activity_task_scheduled_event_attributes.activity_type.name for event in events]
    assert scheduled.count("end_episode") >= 1  # whichever met the failures
    assert "begin_group" not in scheduled
