"""Keeps one engine supplied with versions until it is removed: watches it and loads the versions it should have.

Signals that arrive during a load lead to one more load, of the newest version. The workflow decides by the state that
the engine's agent reports.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.serving.engines import EngineActivities, EngineLoad, EngineReport, EngineUnload, EngineWatch
    from workflows import names
    from workflows.activity_options import ENGINE_LOAD, ENGINE_WATCH
    from workflows.long_running import LongRunningWorkflow, reason_of
    from workflows.page_links import NO_PAGE
    from workflows.state import EngineState

# An activity that failed with an error that Temporal does not retry is started again after this time.
RETRY_AFTER = timedelta(minutes=1)
# About where Temporal suggests to continue as new; at 51,200 it ends a workflow.
SUGGESTED_EVENTS = 4096


@workflow.defn(name=names.ENGINE_WORKFLOW)
class EngineWorkflow(LongRunningWorkflow):
    @workflow.init
    def __init__(self, state: EngineState) -> None:
        super().__init__(state.roll_over_events)
        self._state = state
        if state.since is None:
            state.since = workflow.now()
        self._queue = names.engine_queue(state.engine_id)
        self._to_unload = False
        self._loading = False
        self._problem = ""
        self._removed = False

    @workflow.run
    async def run(self, state: EngineState) -> None:
        tasks = [self._start(self._repeat(activity)) for activity in (self._watch, self._load, self._unload)]
        self._show()
        await workflow.wait_condition(lambda: self._removed or self._must_roll_over() or self._bug is not None)
        if not self._removed:
            self._raise_bug()
        # Wait for a running load: otherwise the next run would start it again beside this one (harmless). Do not wait
        # without limit: while the agent is down the load does not end, and every publish adds a signal to the history.
        await workflow.wait_condition(
            lambda: self._removed or ((not self._loading or self._must_not_grow()) and workflow.all_handlers_finished())
        )
        if self._removed:
            workflow.set_current_details("The engine was removed.")
            return  # the activities that still run learn from their next heartbeat that the workflow is gone
        del tasks  # this run's watch learns from its next heartbeat that the run is gone
        self._state.wanted = self._state.wanted or self._loading
        workflow.continue_as_new(self._state)

    @workflow.signal(name=names.PUBLISH)
    def publish(self) -> None:
        self._state.wanted = True

    @workflow.signal(name=names.ENGINE_REMOVED)
    def engine_removed(self) -> None:
        self._removed = True

    # Three activities, concurrently --------------------------------------------------------------------------------

    async def _repeat(self, activity: Callable[[], Coroutine[Any, Any, EngineReport]]) -> None:
        while True:
            try:
                report = await activity()
                self._problem = ""
                self._record(report)
            except ActivityError as error:
                self._problem = reason_of(error)
                self._show()
                await workflow.sleep(RETRY_AFTER, summary="until it is tried again")

    async def _watch(self) -> EngineReport:
        return await workflow.execute_activity_method(
            EngineActivities.watch_engine,
            EngineWatch(engine_id=self._state.engine_id, seen=self._state.has),
            summary="watch the engine until something changes",
            **(ENGINE_WATCH | {"task_queue": self._queue}),
        )

    async def _load(self) -> EngineReport:
        await workflow.wait_condition(lambda: self._state.wanted)
        self._state.wanted, self._loading = False, True
        try:
            return await workflow.execute_activity_method(
                EngineActivities.load_versions,
                EngineLoad(engine_id=self._state.engine_id),
                summary="load what is wanted, the newest last",
                **(ENGINE_LOAD | {"task_queue": self._queue}),
            )
        finally:
            self._loading = False

    async def _unload(self) -> EngineReport:
        await workflow.wait_condition(lambda: self._to_unload)
        self._to_unload = False
        return await workflow.execute_activity_method(
            EngineActivities.unload_versions,
            EngineUnload(engine_id=self._state.engine_id),
            summary="unload what is no longer needed",
            **(ENGINE_LOAD | {"task_queue": self._queue}),
        )

    def _record(self, report: EngineReport) -> None:
        if self._state.has is None or self._state.has.healthy != report.healthy:
            self._state.since = workflow.now()
            workflow.upsert_search_attributes([names.STATE.value_set("healthy" if report.healthy else "unhealthy")])
        self._state.has = report
        self._state.wanted = self._state.wanted or (report.healthy and bool(report.missing))
        self._to_unload = self._to_unload or (report.healthy and bool(report.leaving))
        self._show()

    def _must_not_grow(self) -> bool:
        limit = self._state.roll_over_events or SUGGESTED_EVENTS
        return workflow.info().get_current_history_length() >= 2 * limit

    def _show(self) -> None:
        workflow.set_current_details(_description(self._state, self._problem))


def _description(state: EngineState, problem: str) -> str:
    """The engine's state, for people; ids, names and reasons only."""
    report = state.has
    if report is None:
        lines = ["Its agent has not checked it yet."]
    else:
        health = (
            "Healthy" if report.healthy else f"Out of rotation ({report.problem})" if report.problem else "Unhealthy"
        )
        lines = [f"{health} since {state.since:%Y-%m-%d %H:%M:%S} UTC."]
        if report.healthy:
            lines.append(f"Serves {_join(report.versions) or 'the base model only'}.")
        if report.missing:
            why = f": {report.problem}" if report.problem else ""
            lines.append(f"Should have {_join(report.missing)} and gets no requests for it until it has{why}.")
        if report.leaving:
            lines.append(f"Unloads {_join(report.leaving)}.")
    if problem:
        lines.append(f"Its agent could not do what it was asked: {problem}.")
    lines.append(NO_PAGE.of_engine(state.engine_id))
    return "\n\n".join(lines)


def _join(versions: list[str]) -> str:
    return ", ".join(versions)
