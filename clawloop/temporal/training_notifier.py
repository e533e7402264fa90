"""How training workflows are told, by samples and by operators.

Knows nothing about what they do. Telling twice does no harm, and not telling costs time only: what they decide by
stands in PostgreSQL.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import BaseModel
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDConflictPolicy

from activities.training.messages import PauseTraining, Pin, ResumeTraining, RollBack, SetRecipe
from clawloop.contracts.training import TrainingState
from clawloop.errors import SignalFailed
from clawloop.recipes.recipe import Recipe
from clawloop.temporal.deadline import UPDATE_LIMIT, temporal_deadline
from workflows import names
from workflows.state import PolicyTraining


class DisconnectedTraining:
    """Satisfies `api.ports.Operations` where there is no Temporal: what operators say waits in PostgreSQL."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def pause(self, policy: str, reason: str) -> None:
        self._fail()

    async def resume(self, policy: str, retry: bool) -> None:
        self._fail()

    async def roll_back(self, policy: str, version: int) -> None:
        self._fail()

    async def pin(self, policy: str, version: int | None) -> None:
        self._fail()

    async def set_recipe(self, policy: str, recipe: Recipe) -> None:
        self._fail()

    def _fail(self) -> NoReturn:
        raise SignalFailed(self._why)


class TemporalTraining:
    """Satisfies `activities.training.ports.WorkNotifier` and `api.ports.Operations`.

    Args:
        client: may be lazy; it connects again by itself.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def notify_work(self, policy: str) -> None:
        """Wake the policy's workflow by signal-with-start, which needs Temporal's server, but no worker.

        Raises:
            SignalFailed
        """
        found_by: list[SearchAttributePair[Any]] = [
            SearchAttributePair(names.POLICY, policy),
            SearchAttributePair(names.STATE, str(TrainingState.WAITING)),
        ]
        async with temporal_deadline():
            await self._client.start_workflow(
                names.TRAINING_WORKFLOW,
                PolicyTraining(policy=policy),
                id=names.training_workflow_id(policy),
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=names.WORK_WAITING,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                search_attributes=TypedSearchAttributes(found_by),
                static_summary=f"{policy}: steps and versions",
            )

    async def pause(self, policy: str, reason: str) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._update(policy, names.PAUSE, PauseTraining(reason=reason))

    async def resume(self, policy: str, retry: bool) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._update(policy, names.RESUME, ResumeTraining(retry=retry))

    async def roll_back(self, policy: str, version: int) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._update(policy, names.ROLL_BACK, RollBack(version=version))

    async def pin(self, policy: str, version: int | None) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._update(policy, names.PIN, Pin(version=version))

    async def set_recipe(self, policy: str, recipe: Recipe) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._update(policy, names.SET_RECIPE, SetRecipe(name=recipe.name, hash=recipe.hash))

    async def _update(self, policy: str, name: str, message: BaseModel) -> None:
        handle = self._client.get_workflow_handle(names.training_workflow_id(policy))
        async with temporal_deadline(UPDATE_LIMIT):
            await handle.execute_update(name, message)
