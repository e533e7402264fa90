"""A fake of `EngineControl`: adapters in memory."""

from __future__ import annotations

import json
from pathlib import Path

from clawloop.core.adapters.directory import CONFIG_FILE, check_version
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import EngineRejected, EngineUnavailable


class FakeEngineControl:
    """
    Attributes:
        listed: the loaded adapters.
        loads: names of all load requests, in order.
        busy: adapters with requests.
        alive: False makes every call fail as if the engine could not be reached.
        silent: True makes health time out.
        refuses: names that cannot be loaded, with the reason.
    """

    def __init__(self, adapters: Path | None = None, slots: int = 4) -> None:
        self.listed: set[str] = set()
        self.loads: list[str] = []
        self.busy: set[str] = set()
        self.alive = True
        self.silent = False
        self.refuses: dict[str, str] = {}
        self._adapters = adapters
        self._slots = slots

    def restart(self) -> None:
        """Come back up with the base model only."""
        self.alive = True
        self.listed.clear()
        self.busy.clear()

    async def load(self, version: VersionRef, name: str) -> None:
        if self._adapters is not None:
            path = self._adapters / version.path
            check_version(path, version.sha256)
            if "r" not in json.loads((path / CONFIG_FILE).read_text()):
                raise EngineRejected(500, {"message": "Missing required configuration fields"})
        self._require_alive()
        self.loads.append(name)
        if name in self.refuses:
            raise EngineRejected(400, {"message": self.refuses[name]})
        self.listed.add(name)

    async def unload(self, name: str) -> None:
        self._require_alive()
        self.listed.discard(name)

    async def names(self) -> frozenset[str]:
        self._require_alive()
        return frozenset(self.listed)

    async def running(self) -> frozenset[str]:
        self._require_alive()
        return frozenset(self.busy)

    async def slots(self) -> int:
        self._require_alive()
        return self._slots

    async def healthy(self) -> bool:
        if self.silent:
            raise EngineUnavailable("no answer within 10 s")
        return self.alive

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine cannot be reached")
