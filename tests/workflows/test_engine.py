"""An engine's workflow, and the sweep's schedule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.client import Client, ScheduleHandle, ScheduleIntervalSpec
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.serving.engines import EngineReconciler
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.server import SWEEP_CATCH_UP, SWEEP_EVERY, begin_sweeping
from clawloop.core.contracts.notices import EngineRemoved, VersionToLoad
from clawloop.core.contracts.serving import Engine
from tests.fakes.ledger import FakeLedger
from tests.fakes.publishing_store import FakePublishingStore
from tests.workflows.conftest import IDLE, until
from tests.workflows.engine_agent import ScriptedAgent, at_work, details
from workflows import names
from workflows.engine import EngineWorkflow
from workflows.state import EngineState

# An engine's workflow: its activities, and what the Temporal UI shows.


async def test_many_signals_during_a_load_lead_to_one_more_load(client: Client) -> None:
    agent = ScriptedAgent()
    notifier = TemporalNotifier(client, IDLE)
    async with at_work(client, agent):
        agent.gate.clear()
        await notifier.notify(VersionToLoad(agent.engine_id))
        await until(lambda: agent.loads == 1)
        for _ in range(10):
            await notifier.notify(VersionToLoad(agent.engine_id))
        agent.gate.set()
        await until(lambda: agent.loads == 2)
        await asyncio.sleep(0.3)
        assert agent.loads == 2


async def test_versions_that_the_watch_reports_are_loaded_and_unloaded(client: Client) -> None:
    agent = ScriptedAgent()
    async with at_work(client, agent) as handle:
        agent.report(missing=["default-v3"])
        await until(lambda: agent.loads == 1)
        assert await details(handle, "Serves default-v3.")  # before, the UI shows that it should
        agent.report(versions=["default-v3"], leaving=["default-v1"])
        await until(lambda: agent.unloads == 1)
        assert (agent.loads, agent.unloads) == (1, 1)


async def test_the_ui_shows_the_state_of_the_engine(client: Client) -> None:
    agent = ScriptedAgent()
    async with at_work(client, agent) as handle:
        assert "Serves the base model only." in await details(handle, "Healthy since 20")
        agent.report(healthy=False, problem="does not answer")
        assert (await details(handle, "Out of rotation")).startswith("Out of rotation (does not answer) since 20")
        described = await handle.describe()
        assert described.typed_search_attributes[names.ENGINE] == agent.engine_id
        assert described.typed_search_attributes[names.STATE] == "unhealthy"
        assert await described.static_summary() == f"engine {agent.engine_id}: the versions it has"


async def test_an_idle_engine_adds_nothing_to_its_history(client: Client) -> None:
    agent = ScriptedAgent()
    async with at_work(client, agent) as handle:
        before = len((await handle.fetch_history()).events)
        await asyncio.sleep(2)
        assert len((await handle.fetch_history()).events) == before < 20


async def test_a_publish_costs_few_events(client: Client) -> None:
    agent = ScriptedAgent()
    async with at_work(client, agent) as handle:
        before = len((await handle.fetch_history()).events)
        for n in range(5):
            await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
            await until(lambda n=n: agent.loads == n + 1)  # type: ignore[misc]
        await details(handle, "Healthy")
        assert len((await handle.fetch_history()).events) - before <= 5 * 10


async def test_a_permanent_failure_is_shown(client: Client) -> None:
    agent = ScriptedAgent()
    agent.fails = [ApplicationError("RecordUnusable", type="RecordUnusable", non_retryable=True)]
    async with at_work(client, agent) as handle:
        await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
        assert "could not do what it was asked: RecordUnusable" in await details(handle, "could not")


async def test_each_engine_has_a_workflow_and_a_removed_one_has_none(client: Client) -> None:
    agent, ledger, workflows = ScriptedAgent(), FakeLedger(), TemporalNotifier(client, IDLE)
    reconciler = EngineReconciler(FakePublishingStore(ledger), workflows, workflows.running_engines)
    async with at_work(client, agent) as handle:
        await until_indexed(workflows, agent.engine_id, runs=True)
        added = ScriptedAgent().engine_id
        ledger.engines = {one: engine_of(one) for one in (agent.engine_id, added)}
        await reconciler.reconcile()
        await until_indexed(workflows, added, runs=True)
        ledger.engines = {}
        assert await reconciler.reconcile() >= 2  # other tests may have left theirs
        await handle.result()
        await until_indexed(workflows, agent.engine_id, runs=False)
        assert await details(handle, "removed") == "The engine was removed."
        await until_indexed(workflows, added, runs=False)
        await workflows.notify(EngineRemoved(added))  # idempotent
        ledger.engines = {agent.engine_id: engine_of(agent.engine_id)}  # added again; its agent has kept running
        await reconciler.reconcile()
        watched = len(agent.watched)
        await until(lambda: len(agent.watched) > watched)


def engine_of(engine_id: str) -> Engine:
    return Engine(engine_id, f"http://{engine_id}", {}, draining=False)


async def until_indexed(workflows: TemporalNotifier, engine_id: str, *, runs: bool) -> None:
    """Wait until Temporal has indexed whether the engine's workflow runs."""
    async with asyncio.timeout(30):
        while (engine_id in await workflows.running_engines()) != runs:
            await asyncio.sleep(0.05)


async def test_a_new_run_continues_with_the_state_of_the_old_one(client: Client) -> None:
    agent = ScriptedAgent()
    agent.has = agent.has.model_copy(update={"versions": ["default-v1"]})
    handle = await client.start_workflow(
        names.ENGINE_WORKFLOW,
        EngineState(engine_id=agent.engine_id, roll_over_events=20),
        id=names.engine_workflow_id(agent.engine_id),
        task_queue=names.WORKFLOW_QUEUE,
    )
    first = handle.result_run_id
    async with at_work(client, agent) as latest:
        for n in range(6):
            await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
            await until(lambda n=n: agent.loads >= n + 1)  # type: ignore[misc]
        async with asyncio.timeout(30):
            while (await latest.describe()).run_id == first:
                await asyncio.sleep(0.05)
        assert "Serves default-v1." in await details(latest, "Serves")
        loads = agent.loads
        await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
        await until(lambda: agent.loads > loads)


@pytest.mark.parametrize("missing", [[], ["default-v2"]])
async def test_the_workflow_of_an_engine_whose_agent_is_away_waits_for_it(client: Client, missing: list[str]) -> None:
    agent = ScriptedAgent()
    agent.has = agent.has.model_copy(update={"missing": missing})
    await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
    async with at_work(client, agent):
        await until(lambda: agent.loads >= 1)


async def test_signals_while_the_agent_is_away_roll_over_and_lead_to_a_load(client: Client) -> None:
    agent = ScriptedAgent()
    handle = await client.start_workflow(
        names.ENGINE_WORKFLOW,
        EngineState(engine_id=agent.engine_id, roll_over_events=20),
        id=names.engine_workflow_id(agent.engine_id),
        task_queue=names.WORKFLOW_QUEUE,
    )
    async with Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[EngineWorkflow]):
        async with asyncio.timeout(30):
            latest = client.get_workflow_handle(names.engine_workflow_id(agent.engine_id))
            while (await latest.describe()).run_id == handle.result_run_id:
                await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
                await asyncio.sleep(0.1)
    async with at_work(client, agent):
        await until(lambda: agent.loads >= 1)


async def test_a_workflow_that_waits_to_roll_over_ends_when_its_engine_is_removed(client: Client) -> None:
    engine_id, workflows = ScriptedAgent().engine_id, TemporalNotifier(client, IDLE)
    handle = await client.start_workflow(
        names.ENGINE_WORKFLOW,
        EngineState(engine_id=engine_id, roll_over_events=10),
        id=names.engine_workflow_id(engine_id),
        task_queue=names.WORKFLOW_QUEUE,
    )
    async with Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[EngineWorkflow]), asyncio.timeout(30):
        # No agent loads, and the workflow waits for the load. How many events a publish adds depends on its timing.
        while (await handle.describe()).history_length < 12:
            await workflows.notify(VersionToLoad(engine_id))
            await asyncio.sleep(0.1)
        await workflows.notify(EngineRemoved(engine_id))
        await handle.result()


# The schedule that starts the sweep, on a real Temporal server.


@pytest.fixture
async def sweep_schedule(client: Client) -> AsyncIterator[ScheduleHandle]:
    handle = client.get_schedule_handle(names.SWEEP_ID)
    yield handle
    await handle.delete()


async def test_a_server_that_was_off_catches_up_with_the_newest_sweep_only(
    client: Client, sweep_schedule: ScheduleHandle
) -> None:
    await begin_sweeping(client)
    schedule = (await sweep_schedule.describe()).schedule
    assert schedule.spec.intervals == [ScheduleIntervalSpec(every=SWEEP_EVERY)]
    assert schedule.policy.catchup_window == SWEEP_CATCH_UP == timedelta(minutes=2)


async def test_a_paused_schedule_stays_paused(client: Client, sweep_schedule: ScheduleHandle) -> None:
    await begin_sweeping(client)
    await sweep_schedule.pause(note="maintenance")
    await begin_sweeping(client)
    state = (await sweep_schedule.describe()).schedule.state
    assert (state.paused, state.note) == (True, "maintenance")
