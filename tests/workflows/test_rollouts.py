"""Rollout groups on a real Temporal server, with a scripted runner in place of sandboxes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.processes.bootstrap import prepare
from clawloop.app.temporal.server import TemporalEnvironmentWorkers
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
from clawloop.core.episodes.running import EnvironmentActivities, EpisodeRunner, KeyOfEpisode, environment_queue
from clawloop.core.errors import EpisodeUnusable, SandboxFailed
from clawloop.core.ids import EpisodeId, new_rollout_group_id
from clawloop.environments.gateway import WorkerGateway
from clawloop.environments.harbor import HarborEnvironment, HarborTask
from clawloop.environments.runner import SandboxRunner
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import Containers, SandboxesByImage
from clawloop.sandboxes.folders import BoxFolders
from tests.fakes.episode_store import FakeEpisodeStore
from tests.sandboxes.test_bubblewrap import open_folder
from tests.sandboxes.test_containers import stand_in
from tests.verbs import clawloop
from tests.workflows.conftest import SHORT_PAUSES, end_all
from tests.workflows.scripted_rollouts import (
    Artifacts,
    ScriptedRunner,
    environment_worker,
    orchestrating,
    run_group,
    run_group_with_timers,
    start_group,
    working,
)
from workflows import names
from workflows.activity_options import EPISODE_ATTEMPTS, LOCAL_STORE, ActivityOptions, run_in, verify_in
from workflows.rollouts import RolloutsWorkflow
from workflows.state import PolicyRollouts

__all__ = ["open_folder"]


# Rollout groups on Temporal's real development server, with a scripted runner in place of sandboxes.


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
        result = await (await start_group(client, group.id)).result()
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
        handle = await start_group(client, group.id)
        result = await handle.result()
        events = [event async for event in handle.fetch_history_events()]
    assert (result.state, result.scored) == (GroupState.SETTLED, 2)
    assert sorted(runner.ran) == [(0, 1), (1, 1)]
    scheduled = [event.activity_task_scheduled_event_attributes.activity_type.name for event in events]
    assert scheduled.count("end_episode") >= 1  # whichever met the failures
    assert "begin_group" not in scheduled


# Rollouts of an environment that no worker serves: they wait, say so, and lose nothing. On a real Temporal.


def environment_of_its_own() -> ScriptedRunner:
    """Temporal remembers for minutes who asked for work, e.g. in another test."""
    runner = ScriptedRunner(FakeEpisodeStore())
    runner.environment = f"tasks-{uuid4().hex[:8]}"
    return runner


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.05)


async def test_episodes_wait_for_a_worker_that_comes_later_and_none_is_lost(client: Client) -> None:
    runner, workers = environment_of_its_own(), TemporalEnvironmentWorkers(client)
    group = NewGroup(new_rollout_group_id(), "default", runner.environment, "train-0", 2)
    await runner.store.make_group(group)
    runner.may_run.clear()
    async with orchestrating(client, runner.store, runner):
        handle = await start_group(client, group.id)

        async def wait() -> bool:
            return len((await handle.describe()).raw_description.pending_activities) == 2

        await until(wait)
        assert not await workers.asks_for_work(runner.environment)
        assert not await workers.has_work([new_rollout_group_id(), group.id])  # of the first there is no workflow
        async with environment_worker(client, runner.store, runner):
            await until(lambda: workers.asks_for_work(runner.environment))
            await until(lambda: workers.has_work([new_rollout_group_id(), group.id]))
            runner.may_run.set()
            result = await handle.result()
    assert (result.state, result.scored) == (GroupState.SETTLED, 2)
    assert sorted(runner.ran) == [(0, 1), (1, 1)]
    assert not await workers.has_work([group.id])


async def test_commands_say_that_no_worker_serves_the_environment_until_one_does(
    client: Client, postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    runner = environment_of_its_own()
    await prepare(postgres_url, "tiny", [], ["http://127.0.0.1:9"], {})
    settings = {"DATABASE_URL": postgres_url, "TEMPORAL_ADDRESS": temporal_address, "CLAWLOOP_DATA": str(tmp_path)}
    line = f"problem     no worker serves the environment '{runner.environment}', and its episodes wait: "
    line += f"`clawloop worker environment --tasks {runner.environment}` starts one"
    try:
        start = ("rollouts", "start", "--environment", runner.environment)
        started = await asyncio.to_thread(clawloop, *start, **settings)
        assert (started.returncode, started.stderr) == (0, "")
        assert line in started.stdout
        all_stands = (await asyncio.to_thread(clawloop, "status", **settings)).stdout
        assert line.replace("problem     no", "problem    no") in all_stands
        assert line in (await asyncio.to_thread(clawloop, "rollouts", "pause", "lunch", **settings)).stdout
        assert line in (await asyncio.to_thread(clawloop, "rollouts", "status", **settings)).stdout
        tasks = tmp_path / runner.environment
        for number in range(8):
            task = tasks / f"task-{number}"
            for name, content in {
                "task.toml": '[environment]\nsandbox = "host"\n',
                "instruction.md": f"Write {number}.",
                "solution/solve.sh": "true",
                "tests/test.sh": "true",
            }.items():
                (task / name).parent.mkdir(parents=True, exist_ok=True)
                (task / name).write_text(content)
        of_folder = await asyncio.to_thread(clawloop, "rollouts", "start", "--environment", str(tasks), **settings)
        assert (of_folder.returncode, of_folder.stderr) == (0, "")
        assert line in of_folder.stdout
        async with environment_worker(client, runner.store, runner):
            await until(lambda: TemporalEnvironmentWorkers(client).asks_for_work(runner.environment))
            shown = await asyncio.to_thread(clawloop, "rollouts", "status", "--json", **settings)
        assert json.loads(shown.stdout)["no_worker"] == ""
    finally:
        await end_all(client)


# Why an episode failed reaches the ledger in words that help, and no conversation does; on a real Temporal.

NOT_ENOUGH = "0 of 2 episodes have a reward, 2 are needed; for example: "


async def reasons_of(
    client: Client, environment: str, runner: EpisodeRunner | None = None, key_of: KeyOfEpisode | None = None
) -> tuple[set[str], str]:
    """Those of the episodes of a group, each once, and the group's."""
    store = FakeEpisodeStore()
    scripted = ScriptedRunner(store)
    group = NewGroup(new_rollout_group_id(), "default", environment, "train-0", 2)
    await store.make_group(group)
    activities = EnvironmentActivities(key_of or store.key_of, runner or scripted, Artifacts())
    queue = environment_queue(environment)
    async with (
        orchestrating(client, store, scripted),
        Worker(client, task_queue=queue, activities=[activities.run_episode, activities.verify_episode]),
    ):
        result = await (await start_group(client, group.id)).result()
    assert result.state is GroupState.DROPPED
    return {episode.reason for episode in store.by_id.values()}, result.reason


def with_image() -> HarborEnvironment:
    """Tasks with an image."""
    tasks = [HarborTask(f"task {number}", {}, {}, {}, image="debian:12") for number in range(8)]
    return HarborEnvironment("with-image", tasks)


async def test_an_image_that_cannot_be_pulled_is_told_where_episodes_are_shown(
    client: Client,
    tmp_path: Path,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in(tmp_path, monkeypatch, "docker").write("image", "")
    folders = BoxFolders(open_folder)
    sandboxes = SandboxesByImage(Bubblewrap(Path("/bwrap"), folders, "python3"), Containers.find(folders), folders)
    runner = SandboxRunner(sandboxes, {"with-image": with_image()}, ("127.0.0.1", 9))
    why = "the image debian:12 cannot be pulled: denied: requested access"
    with caplog.at_level(logging.WARNING):
        assert await reasons_of(client, "with-image", runner) == ({why}, f"{NOT_ENOUGH}{why}")
    assert {vars(record)["why"] for record in caplog.records if record.message == "activity failed"} == {why}


async def test_a_worker_without_the_environment_says_so(client: Client) -> None:
    runner = SandboxRunner(Bubblewrap(Path("/bwrap"), BoxFolders(Path("/tmp")), "python3"), {}, ("127.0.0.1", 9))
    reasons, _ = await reasons_of(client, "tasks-elsewhere", runner)
    assert reasons == {"this worker has no environment 'tasks-elsewhere'"}


async def test_a_refused_key_of_a_worker_is_told_with_its_remedy(client: Client) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text="the key ck_secret is not known")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with WorkerGateway.open(url, "ck_secret", patience_seconds=0) as gateway:
            [reason], _ = await reasons_of(client, "tool-call", key_of=gateway.key_of)
    assert reason == (
        f"the gateway at {url}/admin/v1/worker refuses the key (401): make one by"
        " `clawloop key create --scope worker`, and set CLAWLOOP_WORKER_KEY"
    )


class Quoting:
    """Satisfies `EpisodeRunner`; its error quotes the agent."""

    async def require_usable(self, environment: str, task_id: str) -> None:
        pass

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        raise ValueError("the agent said: my password is 1234")

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        raise NotImplementedError


async def test_the_text_of_any_other_error_stays_with_the_worker(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reasons, of_group = await reasons_of(client, "tool-call", Quoting())
    assert (reasons, of_group) == ({"ValueError"}, f"{NOT_ENOUGH}ValueError")
    assert "1234" not in caplog.text
    assert {vars(record)["why"] for record in caplog.records if record.message == "activity failed"} == {None}
