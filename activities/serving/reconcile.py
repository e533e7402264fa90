"""Reconciles engines with their workflows: each engine has a running one, and a removed engine's ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from activities.notify import ConcurrentNotifier
from activities.serving.ports import PublishingStore
from clawloop.contracts.notices import EngineAdded, EngineRemoved, Notifier


class EngineReconciler:
    """
    Args:
        running: engines with a running workflow; raises SignalFailed.
    """

    def __init__(
        self, store: PublishingStore, notifier: Notifier, running: Callable[[], Awaitable[frozenset[str]]]
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._running = running

    async def reconcile(self) -> int:
        """Start missing workflows, end those of removed engines; the number of both.

        Raises:
            StoreUnavailable
            SignalFailed: names the engines. The others were reconciled, and the next sweep retries.
        """
        # Read the workflows before the engines: for an engine added in between, the second start has no effect, and no
        # workflow is ended wrongly.
        running = await self._running()
        engines = {engine.id for engine in await self._store.engines()}

        async def begin_or_end(engine_id: str) -> None:
            await self._notifier.notify(EngineAdded(engine_id) if engine_id in engines else EngineRemoved(engine_id))

        differing = sorted(engines ^ running)
        notifier = ConcurrentNotifier[str]("engine")
        await notifier.notify_each(differing, str, begin_or_end)
        notifier.raise_if_any_failed()
        return len(differing)
