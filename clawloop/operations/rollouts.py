"""Operators' changes to a policy's rollouts: PostgreSQL decides; the workflow is then notified, best effort."""

from __future__ import annotations

import shlex
from dataclasses import replace

from clawloop.contracts.episodes import RolloutsPlan, RolloutsView
from clawloop.contracts.notices import Notifier, RolloutsChanged
from clawloop.errors import SignalFailed
from clawloop.operations.applied import Applied, notify_best_effort
from clawloop.operations.ports import EnvironmentWorkers, RolloutsStore
from clawloop.operations.reasons import check_reason

# Workers that are named environments and nothing else; any other name is that of a folder or a package.
OURS = ("browser", "reasoning-gym", "swe", "terminal", "tool-call")
# Episodes begin in the order of their groups: if a worker is busy, it is with one of the oldest.
_GROUPS_LOOKED_AT = 32


class RolloutOperations:
    """Every operation raises what the `RolloutsStore` raises."""

    def __init__(self, store: RolloutsStore, notifier: Notifier, workers: EnvironmentWorkers) -> None:
        self._store = store
        self._notifier = notifier
        self._workers = workers

    async def start(self, policy: str, plan: RolloutsPlan) -> Applied[RolloutsView]:
        """Start rollouts, or continue them by this plan."""
        return await self._notified(await self._store.start(policy, plan))

    async def pause(self, policy: str, reason: str) -> Applied[RolloutsView]:
        """Start no group until they are started again; those in flight are finished.

        Raises:
            ValueRejected: the reason is empty or too long.
        """
        return await self._notified(await self._store.pause(policy, check_reason(reason)))

    async def status(self, policy: str) -> RolloutsView:
        return await self._with_workers(await self._store.status(policy))

    async def _notified(self, view: RolloutsView) -> Applied[RolloutsView]:
        applied = await notify_best_effort(view, self._notifier.notify(RolloutsChanged(view.policy)))
        if applied.signal_error is not None:
            return applied  # Temporal does not answer, and is not waited for twice
        return Applied(await self._with_workers(view))

    async def _with_workers(self, view: RolloutsView) -> RolloutsView:
        if view.plan is None or await self._is_served(view.plan.environment):
            return view
        return replace(view, no_worker=no_worker(view.plan.environment))

    async def _is_served(self, environment: str) -> bool:
        """True also where Temporal does not answer: that is said elsewhere."""
        try:
            if await self._workers.asks_for_work(environment):
                return True
            return await self._workers.has_work(await self._store.oldest_open(environment, _GROUPS_LOOKED_AT))
        except SignalFailed:
            return True


def no_worker(environment: str) -> str:
    """One line: that no worker serves the environment, and what starts one."""
    name = shlex.quote(environment)
    if environment in OURS:
        how = f"`clawloop worker environment --environment {name}` starts one"
    else:
        how = (
            f"`clawloop worker environment --tasks {name}` starts one for a folder of tasks,"
            f" `clawloop-environment --verifiers {name}` for a package of verifiers"
        )
    return f"no worker serves the environment {environment!r}, and its episodes wait: {how}"
