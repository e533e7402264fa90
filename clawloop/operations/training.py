"""Operators' changes to a policy's training: PostgreSQL decides; the workflow is then notified, best effort."""

from __future__ import annotations

from clawloop.contracts.notices import BatchWaits, Notifier, OperatorChanged
from clawloop.contracts.training import BroughtAdapter, OperatorAction, OperatorChange, TrainingView
from clawloop.operations.applied import Applied, notify_best_effort
from clawloop.operations.policy_names import check_policy_name
from clawloop.operations.ports import TrainingStore
from clawloop.operations.reasons import check_reason
from clawloop.recipes.recipe import Recipe, require_rank


class TrainingOperations:
    """Every operation raises what the `TrainingStore` raises.

    Args:
        max_lora_rank: of the adapters that engines take.
    """

    def __init__(self, store: TrainingStore, notifier: Notifier, max_lora_rank: int) -> None:
        self._store = store
        self._notifier = notifier
        self._max_lora_rank = max_lora_rank

    async def pause(self, policy: str, reason: str) -> Applied[TrainingView]:
        """Claim no batch until resumed; a step that runs is finished.

        Raises:
            ValueRejected: the reason is empty or too long.
        """
        reason = check_reason(reason)
        return await self._notify(await self._store.pause(policy, reason), OperatorAction.PAUSE, reason)

    async def resume(self, policy: str, *, retry: bool) -> Applied[TrainingView]:
        """Claim batches again; with `retry`, quarantined samples are fresh again."""
        view = await self._store.resume(policy, retry_quarantined=retry)
        return await self._notify(view, OperatorAction.RESUME, "with quarantined samples" if retry else "as before")

    async def roll_back(self, policy: str, version: int) -> Applied[TrainingView]:
        """Go on from an earlier version; a step that runs is abandoned, and its samples are fresh again."""
        view = await self._store.roll_back(policy, version)
        return await self._notify(view, OperatorAction.ROLL_BACK, f"to version {version}")

    async def release(self, policy: str, version: int) -> Applied[TrainingView]:
        """Accept a version that the gate rejected, and go on from it; an open step is abandoned."""
        view = await self._store.release(policy, version)
        return await self._notify(view, OperatorAction.RELEASE, f"version {version}")

    async def pin(self, policy: str, version: int | None) -> Applied[TrainingView]:
        """Let one version answer whatever is trained; None: the newest one answers again."""
        view = await (self._store.unpin(policy) if version is None else self._store.pin(policy, version))
        return await self._notify(view, OperatorAction.PIN, "none" if version is None else f"version {version}")

    async def create_policy(
        self, name: str, like: str, recipe: Recipe | None, version: int = 0, brought: BroughtAdapter | None = None
    ) -> Applied[TrainingView]:
        """Make a policy that begins from a version of the policy `like`.

        Args:
            recipe: one that `check_recipe` returned; None takes that of `like`.
            version: 0: the base model; the policy's workflow then starts with its first batch.
            brought: what it begins from in place of a version.

        Raises:
            ValueRejected: the name cannot be a policy's.
            StateConflict: it is one's already, or nothing can begin from the version.
        """
        view = await self._store.create_policy(check_policy_name(name), like, recipe, version, brought)
        if not view.unpublished:
            return Applied(view)
        return await notify_best_effort(view, self._notifier.notify(BatchWaits(view.policy)))

    async def retire_policy(self, policy: str) -> Applied[TrainingView]:
        """End a policy for good; a step that runs is finished."""
        return await self._notify(await self._store.retire_policy(policy), OperatorAction.PAUSE, "retired")

    def check_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe, if engines take its adapters.

        Raises:
            RecipeRejected: the LoRA rank is above that of the engines.
        """
        require_rank(recipe, self._max_lora_rank)
        return recipe

    async def set_recipe(self, policy: str, recipe: Recipe) -> Applied[TrainingView]:
        """Use a recipe that `check_recipe` returned, from the next step on."""
        view = await self._store.set_recipe(policy, recipe)
        return await self._notify(view, OperatorAction.SET_RECIPE, f"{recipe.name} {recipe.hash[:12]}")

    async def _notify(self, view: TrainingView, action: OperatorAction, detail: str) -> Applied[TrainingView]:
        notice = OperatorChanged(view.policy, OperatorChange(action, detail))
        return await notify_best_effort(view, self._notifier.notify(notice))
