"""Operators' changes of a policy's training, and one version with the samples that it was trained on."""

from __future__ import annotations

import re
from typing import Protocol

from clawloop.core.contracts.answers import Counts, PolicyEvent, ReplyFigures, TrainedReply, VersionDetail
from clawloop.core.contracts.notices import BatchWaits, Notifier, OperatorChanged
from clawloop.core.contracts.training import BroughtAdapter, OperatorAction, OperatorChange, TrainingView, VersionView
from clawloop.core.errors import NotFound, ValueRejected
from clawloop.core.recipes.recipe import Recipe, require_rank
from clawloop.operations.applied import Applied, notify_best_effort

# Reasons --------------------------------------------------------------------------------------------------------------
# Reasons that operators give for a pause; people read them beside the state they explain.

REASON_CHARACTERS = 500
"""A reason stands in one line of the page and of `status`; a longer text belongs elsewhere."""


def check_reason(reason: str) -> str:
    """The reason, without space around it.

    Raises:
        ValueRejected: it says nothing, or too much.
    """
    if not 0 < len(stripped := reason.strip()) <= REASON_CHARACTERS:
        raise ValueRejected(f"A reason has 1 to {REASON_CHARACTERS} characters.", field="reason")
    return stripped


# Names of policies ----------------------------------------------------------------------------------------------------
# Names that a policy may have: they stand in model names, in paths of adapters and in ids of workflows.

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
# `policy` is every key's own policy; `X-side` and `X-v7` are names of its side turns and versions.
_TAKEN = re.compile(r"policy|.*-side|.*-v\d+")


def check_policy_name(name: str) -> str:
    """The name.

    Raises:
        ValueRejected: it cannot be a policy's name.
    """
    if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ValueRejected(
            "A policy's name has up to 63 small letters, digits, `.`, `_` and `-`, and begins with a letter or digit. "
            "It is not `policy`, and ends neither in `-side` nor in `-v` and a number.",
            field="name",
        )
    return name


# Training -------------------------------------------------------------------------------------------------------------
# Operators' changes to a policy's training: PostgreSQL decides; the workflow is then notified, best effort.


class TrainingStore(Protocol):
    """Operators' view of a policy's training, and their changes to it.

    Every method raises NotFound if there is no such policy.
    """

    async def status(self, policy: str) -> TrainingView:
        """The status of the policy's training."""

    async def versions(self, policy: str) -> list[VersionView]:
        """All versions of the policy, by number, removed ones included."""

    async def create_policy(
        self, name: str, like: str, recipe: Recipe | None, version: int = 0, brought: BroughtAdapter | None = None
    ) -> TrainingView:
        """Make a policy that begins from a version of the policy `like`, with its aliases and sampling.

        Args:
            recipe: None takes that of `like`.
            version: it is the new policy's version 1 and head; 0: the base model.
            brought: likewise, in place of a version.

        Raises:
            NotFound: there is no such version.
            StateConflict: there is a policy of this name, the name cannot be told from the base model's, the version
                was never accepted or its files were removed, or no step of the recipe can start from it.
        """

    async def retire_policy(self, policy: str) -> TrainingView:
        """End a policy for good: its keys are revoked, it learns no more, and engines unload its versions.

        Raises:
            StateConflict: it is the default policy, or was retired, as for every other change of a retired policy.
        """

    async def pause(self, policy: str, reason: str) -> TrainingView:
        """Claim no batch until `resume`; a claimed step finishes."""

    async def resume(self, policy: str, *, retry_quarantined: bool = False) -> TrainingView:
        """Claim batches again.

        Args:
            retry_quarantined: make quarantined samples fresh again.
        """

    async def roll_back(self, policy: str, version: int, recipe: Recipe | None = None) -> TrainingView:
        """Continue from this version: it becomes the head at once, and active as soon as an engine has it.

        A claimed step is abandoned, a publishing in progress becomes invalid (the epoch changes), and turns trained by
        later steps are rolled back. Rolling forward to a rolled-back version works the same way.

        Args:
            recipe: learn by it from the next step on, as `set_recipe`; both happen, or neither.

        Raises:
            RecipeRejected: no step of the recipe can start from the version.
            NotFound: there is no such version.
            StateConflict: its files were removed, it was never accepted, or another version is pinned.
        """

    async def release(self, policy: str, version: int) -> TrainingView:
        """Accept a rejected version by hand: it becomes the head at once, and its samples are trained.

        As after a roll-back, an open step is abandoned, and turns trained by steps beside it are rolled back.

        Raises:
            NotFound: there is no such version.
            StateConflict: it was not rejected, its files were removed, its samples were taken again, or another version
                is pinned.
        """

    async def pin(self, policy: str, version: int) -> TrainingView:
        """Keep this version active, as soon as an engine has it and until `unpin`, whatever is trained.

        Raises:
            NotFound: there is no such version.
            StateConflict: its files were removed, or it was never accepted.
        """

    async def unpin(self, policy: str) -> TrainingView:
        """Make the newest version active again; nothing if none is pinned."""

    async def recipe(self, policy: str) -> Recipe:
        """The recipe that the policy learns by.

        Raises:
            NotFound: the policy has no recipe.
            StateConflict: the stored recipe is not valid any more.
        """

    async def set_recipe(self, policy: str, recipe: Recipe) -> TrainingView:
        """Learn by this recipe from the next step on; nothing if the policy does already.

        Waiting samples of another signal hash expire at once, for good: `recipe changed`.

        Raises:
            RecipeRejected: no step of it can start from the policy's head.
        """


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

    async def roll_back(self, policy: str, version: int, recipe: Recipe | None = None) -> Applied[TrainingView]:
        """Go on from an earlier version; a step that runs is abandoned, and its samples are fresh again.

        Args:
            recipe: one that `check_recipe` returned; no step by the one before begins from the version.
        """
        view = await self._store.roll_back(policy, version, recipe)
        by = "" if recipe is None else f" by {recipe.name} {recipe.hash[:12]}"
        return await self._notify(view, OperatorAction.ROLL_BACK, f"to version {version}{by}")

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
            version: 0: the base model; without general questions to ask it the policy's workflow starts with its first
                batch.
            brought: what it begins from in place of a version.

        Raises:
            ValueRejected: the name cannot be a policy's.
            StateConflict: it is one's already, or nothing can begin from the version.
        """
        view = await self._store.create_policy(check_policy_name(name), like, recipe, version, brought)
        if not (view.unpublished or view.general_unasked):
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


# Versions -------------------------------------------------------------------------------------------------------------
# One version with the samples it was trained on.


class TrainingBrowser(Protocol):
    """Reads what training did. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def batch(self, policy: str, step: int, limit: int | None = None) -> list[TrainedReply]:
        """The samples of a step with their replies, in the batch's order; at most `limit` of them."""

    async def events(self, policy: str, limit: int) -> list[PolicyEvent]:
        """Events of a policy, newest first."""

    async def replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        """The newest main turns with a reply, oldest first."""

    async def base_replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        """Of the policy's first main turns with a reply those that version 0 answered, oldest first."""

    async def counts(self, policy: str) -> Counts:
        """Numbers of a policy's sessions, turns and quarantined samples.

        Raises:
            NotFound: there is no such policy.
        """

    async def mark(self) -> str:
        """A value that changes whenever something that the page shows changes."""


async def version_detail(versions: TrainingStore, batches: TrainingBrowser, policy: str, n: int) -> VersionDetail:
    """
    Raises:
        NotFound: there is no such policy or version.
        StoreUnavailable
    """
    known = await versions.versions(policy)
    shown = next((version for version in known if version.n == n), None)
    if shown is None:
        raise NotFound(f"Policy {policy!r} has no version {n}.", code="version_not_found", field="version")
    return VersionDetail(
        version=shown,
        children=[version.n for version in known if version.parent == n],
        batch=await batches.batch(policy, n),
    )
