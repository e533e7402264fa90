"""Engines' workflows: each engine has one that runs, and one of an engine that was removed ends.

Knows nothing about versions or health; a workflow looks at its engine by itself.
"""

from __future__ import annotations

from activities.notify import Notifier
from activities.training.ports import EngineWorkflows, PublishingStore


class EngineReconciler:
    def __init__(self, store: PublishingStore, workflows: EngineWorkflows) -> None:
        self._store = store
        self._workflows = workflows

    async def reconcile(self) -> int:
        """Begin what is missing, end what is too many; how many workflows were told.

        Raises:
            StoreUnavailable
            SignalFailed: of the engines it names; the others were told, and the next sweep tries again.
        """
        # Asked first: an engine added meanwhile is begun once too often, which is nothing; none is ended wrongly.
        running = await self._workflows.running()
        engines = {engine.id for engine in await self._store.engines()}

        async def tell(engine_id: str) -> None:
            how = self._workflows.begin if engine_id in engines else self._workflows.end
            await how(engine_id)

        wrong = sorted(engines ^ running)
        telling = Notifier[str]("engine")
        await telling.tell(wrong, str, tell)
        telling.raise_if_any_failed()
        return len(wrong)
