"""Probes in memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from clawloop.core.contracts.training import ProbeContent, StoredProbe
from clawloop.core.errors import NotFound, StateConflict
from clawloop.core.ids import ProbeId, new_probe_id


class FakeProbeStore:
    """Satisfies `clawloop.operations.probes.ProbeStore`, for the policy `default`."""

    def __init__(self) -> None:
        self._probes: list[StoredProbe] = []

    async def add(self, policy: str, probes: Sequence[ProbeContent], most: int) -> list[StoredProbe]:
        if len(await self.all(policy)) + len(probes) > most:
            raise StateConflict("Too many.", code="too_many_probes", field="probes")
        added = [StoredProbe(new_probe_id(), probe, datetime.now(UTC)) for probe in probes]
        self._probes += added
        return added

    async def all(self, policy: str) -> list[StoredProbe]:
        if policy != "default":
            raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
        return list(self._probes)

    async def remove(self, policy: str, probe: ProbeId) -> bool:
        left = [each for each in await self.all(policy) if each.id != probe]
        removed = len(left) < len(self._probes)
        self._probes = left
        return removed
