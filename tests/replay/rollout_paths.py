"""Paths through the workflows of rollouts and of their groups whose histories are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from temporalio.client import Client, WorkflowHistory

from clawloop.core.contracts.episodes import AgentRun, Ending, EpisodeEnd, EpisodeScore, NewGroup
from clawloop.core.episodes.keys import KEY_LIFETIME
from clawloop.core.errors import RecordUnusable, SandboxFailed
from clawloop.core.ids import new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from tests.workflows.scripted_rollouts import ScriptedRunner, start_group, working
from workflows import names
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
        handle = await start_group(client, group.id)
        await handle.result()
        return await handle.fetch_history()


async def rollout_group_settled(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """Three episodes run, are verified, and settle the group."""
    return await _group(client, store, runner)


async def rollout_group_with_failures(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    """One place fails three times; another fails once, and its second attempt is truncated; a verifier refuses."""

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
    """An earlier run of the workflow was lost: places that are scored, ended, abandoned and running."""
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 4)
    await store.make_group(group)
    scored, ended, lost, _ = [await store.begin_episode(group.id, place, 1, KEY_LIFETIME) for place in range(4)]
    await store.end_episode(EpisodeEnd(scored.id, Ending.COMPLETED))
    await store.score_episode(EpisodeScore(scored.id, 1.0, ""))
    await store.end_episode(EpisodeEnd(ended.id, Ending.COMPLETED, artifact_sha256="left"))
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE))
    return await _group(client, store, runner, group)


async def rollout_group_judged(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """Votes on the turns of episodes, which the judge refuses for one."""
    store.judged = True
    runner.votes.refused = {1}
    return await _group(client, store, runner)


async def rollout_group_verified_with_its_runs(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    """The verdict comes with the agent's end."""
    runner.run = lambda place, attempt: AgentRun(Ending.COMPLETED, "", b"left", (float(place), ""))
    return await _group(client, store, runner)


async def rollout_group_without_a_refused_reward(
    client: Client, store: FakeEpisodeStore, runner: ScriptedRunner
) -> WorkflowHistory:
    """The ledger refuses a reward, and the episode is recorded without one."""
    runner.verdict = lambda place, n: (1e308 if place == 0 else float(place), "")
    return await _group(client, store, runner)


async def rollout_group_ledger_away(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """Calls of the ledger fail where the workflow runs, and are made on its queue."""
    store.failures = 6
    return await _group(client, store, runner)


async def rollouts_until_paused(client: Client, store: FakeEpisodeStore, runner: ScriptedRunner) -> WorkflowHistory:
    """Groups are started until rollouts are paused."""
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
    """The history is long enough: the workflow continues as new."""
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
    rollout_group_ledger_away,
    rollouts_until_paused,
    rollouts_after_a_failed_group,
    rollouts_rolled_over,
    rollout_group_verified_with_its_runs,
    rollout_group_without_a_refused_reward,
)


async def history(client: Client, path: Path) -> WorkflowHistory:
    """What a workflow on this path leaves behind."""
    store = FakeEpisodeStore()
    return await path(client, store, ScriptedRunner(store))
