"""One engine, for as long as it is one of ours: told of a new version it loads it, and it is watched all the time.

Told ten times while it loads, it loads once more, the newest. What it decides by is what its agent says it saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.serving.engines import EngineActivities
    from activities.serving.messages import EngineHas, EngineLoad, EngineUnload, EngineWatch
    from workflows import names
    from workflows.policies import ENGINE_LOAD, ENGINE_WATCH
    from workflows.reasons import reason_of
    from workflows.state import EngineState

# What failed for good is tried again after this: somebody may have mended it.
AGAIN = timedelta(minutes=1)
# About where Temporal suggests to begin anew; at 51,200 it ends a workflow.
SUGGESTED_EVENTS = 4096


@workflow.defn(name=names.ENGINE_WORKFLOW)
class EngineWorkflow:
    @workflow.init
    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._id = state.engine_id
        self._queue = names.engine_queue(state.engine_id)
        self._has = state.has
        self._since = state.since or workflow.now()
        self._to_load = state.wanted
        self._to_unload = False
        self._loading = False
        self._trouble = ""
        self._removed = False
        self._bug: BaseException | None = None

    @workflow.run
    async def run(self, state: EngineState) -> None:
        tasks = [asyncio.create_task(self._always(work)) for work in (self._watch, self._load, self._unload)]
        for task in tasks:
            task.add_done_callback(self._ended)
        self._show()
        await workflow.wait_condition(lambda: self._removed or self._must_roll_over() or self._bug is not None)
        if self._bug is not None and not self._removed:
            raise self._bug  # the workflow waits here until we have mended it
        # A load is let finish, or its agent would do it twice at once, which is harmless; one whose agent is away does
        # not end, while each publish tells us once more.
        await workflow.wait_condition(
            lambda: self._removed or ((not self._loading or self._must_not_grow()) and workflow.all_handlers_finished())
        )
        if self._removed:
            workflow.set_current_details("The engine was removed.")
            return  # its agent is told by its next heartbeat that nobody waits for it
        # The watch of this run is told by its next heartbeat that nobody waits for it.
        wanted = self._to_load or self._loading
        workflow.continue_as_new(
            self._state.model_copy(update={"has": self._has, "since": self._since, "wanted": wanted})
        )

    @workflow.signal(name=names.PUBLISH)
    def publish(self) -> None:
        self._to_load = True

    @workflow.signal(name=names.ENGINE_REMOVED)
    def engine_removed(self) -> None:
        self._removed = True

    # Its three concerns, side by side ------------------------------------------------------------------------------

    async def _always(self, work: Callable[[], Coroutine[Any, Any, EngineHas]]) -> None:
        while True:
            try:
                has = await work()
                self._trouble = ""
                self._take(has)
            except ActivityError as error:
                self._trouble = reason_of(error)
                self._show()
                await workflow.sleep(AGAIN, summary="until it is tried again")

    async def _watch(self) -> EngineHas:
        ask = EngineWatch(engine_id=self._id, seen=self._has)
        return await workflow.execute_activity_method(
            EngineActivities.watch_engine,
            ask,
            summary="watch the engine until something changes",
            **(ENGINE_WATCH | {"task_queue": self._queue}),
        )

    async def _load(self) -> EngineHas:
        await workflow.wait_condition(lambda: self._to_load)
        self._to_load, self._loading = False, True
        try:
            return await workflow.execute_activity_method(
                EngineActivities.load_versions,
                EngineLoad(engine_id=self._id),
                summary="load what is wanted, the newest last",
                **(ENGINE_LOAD | {"task_queue": self._queue}),
            )
        finally:
            self._loading = False

    async def _unload(self) -> EngineHas:
        await workflow.wait_condition(lambda: self._to_unload)
        self._to_unload = False
        return await workflow.execute_activity_method(
            EngineActivities.unload_versions,
            EngineUnload(engine_id=self._id),
            summary="unload what nobody needs any more",
            **(ENGINE_LOAD | {"task_queue": self._queue}),
        )

    def _take(self, has: EngineHas) -> None:
        if self._has is None or self._has.healthy != has.healthy:
            self._since = workflow.now()
            workflow.upsert_search_attributes([names.STATE.value_set("healthy" if has.healthy else "unhealthy")])
        self._has = has
        self._to_load = self._to_load or (has.healthy and bool(has.missing))
        self._to_unload = self._to_unload or (has.healthy and bool(has.leaving))
        self._show()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    def _must_roll_over(self) -> bool:
        if (limit := self._state.roll_over_events) is not None:
            return workflow.info().get_current_history_length() >= limit
        return workflow.info().is_continue_as_new_suggested()

    def _must_not_grow(self) -> bool:
        limit = self._state.roll_over_events or SUGGESTED_EVENTS
        return workflow.info().get_current_history_length() >= 2 * limit

    def _show(self) -> None:
        workflow.set_current_details(_in_words(self._has, self._since, self._trouble))


def _in_words(has: EngineHas | None, since: datetime, trouble: str) -> str:
    """How the engine stands, for people; ids, names and reasons only."""
    if has is None:
        lines = ["Its agent has not looked at it yet."]
    else:
        state = "Healthy" if has.healthy else f"Out of rotation, it {has.problem}," if has.problem else "Unhealthy"
        lines = [f"{state} since {since:%Y-%m-%d %H:%M:%S} UTC."]
        if has.healthy:
            lines.append(f"Serves {_listed(has.versions) or 'the base model only'}.")
        if has.missing:
            why = f": {has.problem}" if has.problem else ""
            lines.append(f"Should have {_listed(has.missing)} and gets no requests for it until it has{why}.")
        if has.leaving:
            lines.append(f"Unloads {_listed(has.leaving)}.")
    if trouble:
        lines.append(f"Its agent could not do what it was asked: {trouble}.")
    return "\n\n".join(lines)


def _listed(names: list[str]) -> str:
    return ", ".join(names)
