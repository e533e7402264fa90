"""Ports of operations, and the result of one. Every store call may raise StoreUnavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from clawloop.core.contracts.episodes import RolloutsPlan, RolloutsView
from clawloop.core.contracts.sessions import Erasure
from clawloop.core.contracts.training import BroughtAdapter, TrainingView, VersionView
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import RolloutGroupId, SessionId, TurnId
from clawloop.core.judging.plan import RejudgeFacts
from clawloop.core.recipes.recipe import Recipe

# Results --------------------------------------------------------------------------------------------------------------
# The result of an operation that PostgreSQL holds, whether or not its workflow could be notified.

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Applied(Generic[Result]):
    """
    Args:
        signal_error: why the workflow could not be notified; None if it was.
    """

    result: Result
    signal_error: str | None = None


async def notify_best_effort(result: Result, signal: Awaitable[None]) -> Applied[Result]:
    """The result, once its workflow is notified or cannot be."""
    try:
        await signal
    except SignalFailed as error:
        return Applied(result, signal_error=str(error))
    return Applied(result)


# Ports ----------------------------------------------------------------------------------------------------------------
# Ports of operations. Every store call raises StoreUnavailable when PostgreSQL does not answer in time.


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

    async def roll_back(self, policy: str, version: int) -> TrainingView:
        """Continue from this version: it becomes the head at once, and active as soon as an engine has it.

        A claimed step is abandoned, a publishing in progress becomes invalid (the epoch changes), and turns trained by
        later steps are rolled back. Rolling forward to a rolled-back version works the same way.

        Raises:
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


class RejudgeStore(Protocol):
    async def rejudge_facts(self, turn_id: TurnId) -> RejudgeFacts | None:
        """Facts that decide whether the turn can be judged again; None if there is no such turn."""

    async def of_session(self, session: SessionId) -> list[RejudgeFacts]:
        """The session's main turns in their order; empty if there is no such session."""

    async def unjudged(self, limit: int) -> list[RejudgeFacts]:
        """Turns without a valid vote, oldest first."""


class ErasureStore(Protocol):
    """Erases content for good."""

    async def copies_of(self, session: SessionId) -> list[SessionId]:
        """Sessions of side turns alone that quote this one, as summaries of a client do that does not name it."""

    async def erase_session(self, session: SessionId) -> Erasure | None:
        """Erase a session, including turns of it not inserted yet; None if there is no such session."""

    async def erase_turn(self, turn: TurnId) -> Erasure | None:
        """Erase a turn, other replies to its request, and all turns that continue them; None if there is none."""

    async def artifacts_of(self, session: SessionId) -> list[str]:
        """Digests of what the agents of the session's episodes left, and no other episode's agent."""


class RolloutsStore(Protocol):
    """Operators' view of a policy's rollouts, and their changes to them.

    Every method raises NotFound if there is no such policy.
    """

    async def start(self, policy: str, plan: RolloutsPlan) -> RolloutsView:
        """Start rollouts, or continue them by this plan."""

    async def pause(self, policy: str, reason: str) -> RolloutsView:
        """Start no further group.

        Raises:
            NotFound: they were never started.
        """

    async def status(self, policy: str) -> RolloutsView: ...

    async def oldest_open(self, environment: str, limit: int) -> list[RolloutGroupId]:
        """Open groups of the environment, of all policies, oldest first."""


class EnvironmentWorkers(Protocol):
    """View of environments' workers. Every call raises SignalFailed when Temporal does not answer."""

    async def asks_for_work(self, environment: str) -> bool:
        """True if a worker asked for the environment's episodes in the last minutes. A busy worker does not ask."""

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        """True if a worker runs an agent, or a verifier, of one of these groups."""
