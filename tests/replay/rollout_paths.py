"""Paths through the workflows of rollouts and of their groups whose histories are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from temporalio.client import Client, WorkflowFailureError, WorkflowHistory

from clawloop.contracts.episodes import AgentRun, Ending, EpisodeEnd, NewGroup
from clawloop.episodes.keys import KEY_LIFETIME
from clawloop.errors import RecordUnusable, SandboxFailed
from clawloop.ids import new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from tests.workflows.scripted_rollouts import ScriptedRunner, working
from workflows import names
from workflows.rollout_group import RolloutGroupWorkflow
from workflows.rollouts import RolloutsWorkflow
from workflows.state import PolicyRollouts

Path = Callable[[Client, FakeEpisodeStore, ScriptedRunner], Awaitable[WorkflowHistory]]


async def _group(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner, group: NewGroup | None = None
) -> WorkflowHistory:
    if group is None:
        group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 3)
        await store.make_group(group)
    async with working(client, store, runner):
        handle = await client.start_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )
        await handle.result()
        return await handle.fetch_history()


async def rollout_group_settled(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    return await _group(client, store, runner)


async def rollout_group_with_failures(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    def run(place: int, attempt: int) -> AgentRun:
        if place == 0:
            raise SandboxFailed("bubblewrap did not start")
        if place == 1 and attempt == 1:
            return AgentRun(Ending.INFRASTRUCTURE, "exit code 75", b"left")
        return AgentRun(Ending.TRUNCATED_TURNS, "exit code 3", b"left")

    def verdict(place: int, n: int) -> tuple[float | None, str]:
        if place == 2:
            raise RecordUnusable("no artifact")
        return 1.0, ""

    runner.run, runner.verdict = run, verdict
    return await _group(client, store, runner)


async def rollout_group_taken_up_again(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 4)
    await store.make_group(group)
    scored, ended, lost, _ = [await store.begin_episode(group.id, place, 1, KEY_LIFETIME) for place in range(4)]
    await store.end_episode(EpisodeEnd(scored.id, Ending.COMPLETED))
    await store.score_episode(scored.id, 1.0, "")
    await store.end_episode(EpisodeEnd(ended.id, Ending.COMPLETED, artifact_sha256="left"))
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE))
    return await _group(client, store, runner, group)


async def rollout_group_judged(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    store.judged = True
    runner.votes.refused = {1}
    return await _group(client, store, runner)


async def rollout_group_calls_local(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """As a group runs since its calls of the ledger are local: a lost attempt, a verifier, a call that fails."""
    store.failures = 6
    return await rollout_group_with_failures(client, store, runner)


async def rollout_group_verified_with_its_runs(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    runner.run = lambda place, attempt: AgentRun(Ending.COMPLETED, "", b"left", (float(place), ""))
    return await _group(client, store, runner)


async def rollout_group_taken_up_again_local(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    return await rollout_group_taken_up_again(client, store, runner)


async def rollout_group_with_pauses(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """The same failures, since there are pauses between attempts."""
    return await rollout_group_with_failures(client, store, runner)


async def rollout_group_failed_by_a_reward(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    """As a group ended whose ledger refused a reward, before such an episode was recorded without one."""
    runner.verdict = lambda place, n: (1e308 if place == 0 else float(place), "")
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 3)
    await store.make_group(group)
    with suppress(WorkflowFailureError):
        await _group(client, store, runner, group)
    return await client.get_workflow_handle(names.rollout_group_workflow_id(group.id)).fetch_history()


async def rollout_group_without_a_refused_reward(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    runner.verdict = lambda place, n: (1e308 if place == 0 else float(place), "")
    return await _group(client, store, runner)


async def rollouts_with_local_calls(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    return await rollouts_until_paused(client, store, runner)


async def rollouts_until_paused(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    async with working(client, store, runner):
        handle = await client.start_workflow(
            RolloutsWorkflow.run,
            PolicyRollouts(policy="default"),
            id=names.rollouts_workflow_id(str(new_rollout_group_id())),
            task_queue=names.WORKFLOW_QUEUE,
        )
        await handle.result()
        return await handle.fetch_history()


async def rollouts_after_a_failed_group(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    """The group's first run fails; it is tried again at the next look."""
    store.refusals = 1
    return await rollouts_until_paused(client, store, runner)


async def rollouts_rolled_over(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    async with working(client, store, runner):
        handle = await client.start_workflow(
            RolloutsWorkflow.run,
            PolicyRollouts(policy="default", roll_over_events=15),
            id=names.rollouts_workflow_id(str(new_rollout_group_id())),
            task_queue=names.WORKFLOW_QUEUE,
        )
        first = handle.first_execution_run_id
        await handle.result()
        return await client.get_workflow_handle(handle.id, run_id=first).fetch_history()


PATHS: tuple[Path, ...] = (
    rollout_group_settled,
    rollout_group_with_failures,
    rollout_group_taken_up_again,
    rollout_group_judged,
    rollouts_until_paused,
    rollouts_after_a_failed_group,
    rollouts_rolled_over,
    rollout_group_calls_local,
    rollout_group_verified_with_its_runs,
    rollout_group_taken_up_again_local,
    rollouts_with_local_calls,
    rollout_group_with_pauses,
    rollout_group_failed_by_a_reward,
    rollout_group_without_a_refused_reward,
)


async def history(client: Client, path: Path) -> WorkflowHistory:
    """What a workflow on this path leaves behind."""
    store = FakeEpisodeStore()
    return await path(client, store, ScriptedRunner(store))
