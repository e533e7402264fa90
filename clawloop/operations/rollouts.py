"""What operators do to a policy's rollouts: PostgreSQL first, which decides; then their workflow, best effort."""

from __future__ import annotations

from clawloop.contracts.episodes import RolloutsPlan, RolloutsView
from clawloop.operations.applied import Applied, notify_best_effort
from clawloop.operations.ports import RolloutsNotifier, RolloutsStore
from clawloop.operations.reasons import check_reason


class RolloutOperations:
    """Every operation raises what the `RolloutsStore` raises."""

    def __init__(self, store: RolloutsStore, notifier: RolloutsNotifier) -> None:
        self._store = store
        self._notifier = notifier

    async def start(self, policy: str, plan: RolloutsPlan) -> Applied[RolloutsView]:
        """Start rollouts, or continue them by this plan."""
        view = await self._store.start(policy, plan)
        return await notify_best_effort(view, self._notifier.rollouts_changed(policy))

    async def pause(self, policy: str, reason: str) -> Applied[RolloutsView]:
        """Start no group until they are started again; those in flight are finished.

        Raises:
            ValueRejected: the reason is empty or too long.
        """
        view = await self._store.pause(policy, check_reason(reason))
        return await notify_best_effort(view, self._notifier.rollouts_changed(policy))

    async def status(self, policy: str) -> RolloutsView:
        return await self._store.status(policy)
