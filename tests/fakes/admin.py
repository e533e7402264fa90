"""Stores of the admin API in memory: engines, the ledger's check, exports, probes, and votes on turns of episodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID

from clawloop.core.contracts.answers import Broken, CheckReport
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.training import ProbeContent, StoredProbe
from clawloop.core.errors import NotFound, SetupError, StateConflict
from clawloop.core.ids import ProbeId, SessionId, new_probe_id
from clawloop.core.judging.agreement import VotedTurn
from clawloop.core.judging.quality import JudgeTrial
from clawloop.operations.export import ExportedTurn, ExportFilter, Record
from clawloop.operations.overview import ServiceCounts
from tests.fakes.directory_store import FakeDirectoryStore
from tests.fakes.turn_store import FakeTurnStore


class FakeEngineStore:
    """Satisfies `clawloop.operations.engines.EngineStore`."""

    def __init__(self, directory: FakeDirectoryStore) -> None:
        self._directory = directory

    async def engines(self) -> list[Engine]:
        return list((await self._directory.read()).engines)

    async def add(self, url: str) -> Engine:
        engine = Engine(url.partition("://")[2], url, {}, False)
        self._directory.set_engines([*await self.engines(), engine])
        return engine

    async def set_draining(self, engine_id: str, draining: bool) -> None:
        engines = await self.engines()
        self._directory.set_engines(
            [replace(one, draining=draining) if one.id == engine_id else one for one in engines]
        )

    async def remove(self, engine_id: str) -> None:
        self._directory.set_engines([one for one in await self.engines() if one.id != engine_id])


class FakeEngineProbe:
    """Satisfies `clawloop.operations.engines.EngineProbe`: engines on port 1 are silent, and none is guarded."""

    async def healthy(self, engine: Engine) -> bool:
        return not engine.url.endswith(":1")

    async def check(self, url: str) -> list[str]:
        if not url.startswith("http://"):
            raise SetupError(f"engine address {url!r} must look like http://host:port")
        return []

    async def answers_strangers(self, url: str) -> bool:
        return True


async def check_ledger(files: bool) -> CheckReport:
    """A report of a ledger whose files alone are broken."""
    broken = [Broken(invariant="files", row="v1")] if files else []
    return CheckReport(invariants=19, adapters=int(files), violations=broken)


class FakeOverviewStore:
    """Counts of the turns that a fake store has."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns

    async def counts(self) -> ServiceCounts:
        turns = await self._turns.all()
        sessions = {turn.session_id for turn in turns}
        newest = max((turn.record.started_at for turn in turns), default=None)
        return ServiceCounts(("default",), len(sessions), len(sessions), newest, len(turns), late=0)


class FakeExportStore:
    """Satisfies `clawloop.operations.export.ExportStore`: turns, without judgements, samples and steps."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns

    async def has_policy(self, policy: str) -> bool:
        return policy == "default"

    async def turns(
        self, wanted: ExportFilter, after: UUID | None, limit: int, *, judged: bool
    ) -> tuple[list[ExportedTurn], UUID | None]:
        stored = [] if judged else await self._turns.all()
        page = [one for one in stored if after is None or one.record.turn_id > after]
        page = [one for one in page if wanted.session in (None, one.session_id)][:limit]
        found = [
            ExportedTurn(one.record, one.session_id, one.record.evidence.value, 1, one.outcome, [], None)
            for one in page
        ]
        return found, page[-1].record.turn_id if page else None

    async def files(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        return await self._turns.of_session(session, sha256s)

    async def samples(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []

    async def lessons(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []

    async def steps(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []


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


@dataclass
class FakeVoteReader:
    """Votes on turns of episodes of the policy `default`, and a trial of the judge."""

    turns: list[VotedTurn] = field(default_factory=list)
    trial: JudgeTrial | None = None

    async def voted_turns(self, policy: str) -> list[VotedTurn]:
        if policy != "default":
            raise NotFound(f"there is no policy {policy!r}.", code="policy_not_found", field="policy")
        return self.turns

    async def newest_trial(self) -> JudgeTrial | None:
        return self.trial
