"""Reconciles engines with their workflows: each engine has a running one, and a removed engine's ends."""

from __future__ import annotations

from activities.notify import ConcurrentNotifier
from activities.serving.ports import EngineWorkflows, PublishingStore


class EngineReconciler:
    def __init__(self, store: PublishingStore, workflows: EngineWorkflows) -> None:
        self._store = store
        self._workflows = workflows

    async def reconcile(self) -> int:
        """Start missing workflows, end those of removed engines; the number of both.

        Raises:
            StoreUnavailable
            SignalFailed: names the engines. The others were reconciled, and the next sweep retries.
        """
        # Read the workflows before the engines: for an engine added in between, the second start has no effect, and no
        # workflow is ended wrongly.
        running = await self._workflows.running()
        engines = {engine.id for engine in await self._store.engines()}

        async def begin_or_end(engine_id: str) -> None:
            change = self._workflows.begin if engine_id in engines else self._workflows.end
            await change(engine_id)

        differing = sorted(engines ^ running)
        notifier = ConcurrentNotifier[str]("engine")
        await notifier.notify_each(differing, str, begin_or_end)
        notifier.raise_if_any_failed()
        return len(differing)
