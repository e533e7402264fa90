"""Engines' workflows: each engine has one that runs, and one of an engine that was removed ends.

Knows nothing about versions or health; a workflow looks at its engine by itself.
"""

from __future__ import annotations

from activities.training_ports import EngineWorkflows, PublishingStore


class Roster:
    def __init__(self, store: PublishingStore, workflows: EngineWorkflows) -> None:
        self._store = store
        self._workflows = workflows

    async def mend(self) -> int:
        """Begin what is missing, end what is too many; how many workflows were told.

        Raises:
            StoreUnavailable
            AnnouncementFailed: the next sweep tries again.
        """
        # Asked first: an engine added meanwhile is begun once too often, which is nothing; none is ended wrongly.
        running = await self._workflows.running()
        engines = {engine.id for engine in await self._store.engines()}
        for engine_id in sorted(engines - running):
            await self._workflows.begin(engine_id)
        for engine_id in sorted(running - engines):
            await self._workflows.end(engine_id)
        return len(engines ^ running)
