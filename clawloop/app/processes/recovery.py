"""Brings Temporal in line with PostgreSQL after either lost data, and names what PostgreSQL does not know.

PostgreSQL is the truth: what waits there is signalled again, to sessions' workflows that begin anew, as those that ran
drop what they had handled before PostgreSQL lost it. Stored votes and judgements are found, so that nothing is judged
twice. Idempotent, and may end half-way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from temporalio.client import Client

from api.recording.spool import StrandedTurns
from clawloop.app.processes.database import sealer_of
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.recovery import TemporalRecovery
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.contracts.sessions import KeyOfTurns, RejudgeRequested, SessionFacts, ToldTurns, WaitingWork
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.settings import Settings
from db.database import Database
from db.recovery import PostgresRecoveryStore

# Ids in one query; more would make its text large for no gain.
_CHUNK = 1000
# Most lost turns named for one session: their ids say when the loss begins, and logs of clients may name them.
_NAMED = 5


class RecoveryWorkflows(Protocol):
    """Every call raises SignalFailed when Temporal does not answer or refuses."""

    async def prepare(self) -> None:
        """Register what every namespace needs: search attributes and the sweep's schedule. Idempotent."""

    async def shown_version(self, policy: str) -> int | None:
        """The version that the policy's workflow showed last; None if there is no workflow, it shows none or was
        started again since."""

    async def restart_training(self, policy: str) -> None:
        """End the policy's workflow, if it runs, and start it again: it decides by PostgreSQL alone."""

    async def end_sessions(self) -> None:
        """End the sessions' workflows that run: the next signal starts a session's anew, which knows no turn yet."""

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None: ...

    async def sweep(self) -> None:
        """Start a sweep now."""

    def sessions(self) -> AsyncIterator[ToldTurns]:
        """The turns signalled to each run of a session's workflow, open or closed. A session may have several runs."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """
    Args:
        waiting: what the sweep signals again.
        rejudged: judgements asked for again.
        policies: whose training workflow was started again.
        unknown: what Temporal or the disk holds and PostgreSQL does not: one line each.
        put_back: turns that gateways had set aside, and that they try to store again.
    """

    waiting: WaitingWork
    rejudged: int
    policies: tuple[str, ...]
    unknown: tuple[str, ...]
    put_back: int = 0


@dataclass(frozen=True, slots=True)
class _LostVersion:
    policy: str
    n: int
    line: str


class Recovery:
    """
    Args:
        adapters: None: the adapters are on another machine.
        spool: None: so are the gateways.
    """

    def __init__(
        self,
        store: PostgresRecoveryStore,
        workflows: RecoveryWorkflows,
        adapters: AdapterFolder | None,
        spool: StrandedTurns | None = None,
    ) -> None:
        self._store = store
        self._workflows = workflows
        self._adapters = adapters
        self._spool = spool

    async def recover(self, name_lost: Callable[[str], None]) -> Recovered:
        """
        Args:
            name_lost: is given each line of `Recovered.unknown`, before anything changes that shows it.

        Raises:
            SignalFailed, StoreUnavailable, SetupError: run it again; what was done is not done twice.
        """
        await self._workflows.prepare()
        newest = await self._store.newest_versions()
        lost_versions = await self._lost_versions(newest)
        keys = {} if self._spool is None else await self._spool.keys()
        lost_keys = {key: keys[key] for key in await self._store.lost_keys(keys)}
        unknown = [
            *(version.line for version in lost_versions),
            *await self._unknown_sessions(),
            *sorted(_lost_key(key, turns, set(newest)) for key, turns in lost_keys.items()),
        ]
        for line in unknown:
            name_lost(line)
        for policy in newest:
            # Turns that these versions answered are stored with their numbers, also later, from a spool.
            if numbers := [version.n for version in lost_versions if version.policy == policy]:
                await self._store.skip_numbers(policy, max(numbers))
        added = await self._store.add_lost_keys(keys)
        put_back = 0 if self._spool is None else await self._spool.put_back_rejected(added)
        # Before, as a run of this that ends in between must leave no turn that waits without a workflow and is marked;
        # and after, as a workflow that still ran has dropped signals that were sent meanwhile.
        await self._store.forget_signals()
        await self._workflows.end_sessions()
        waiting = await self._store.forget_signals()
        rejudgements = await self._store.open_rejudgements()
        for session, request in rejudgements:
            await self._workflows.rejudge(session, request)
        await self._workflows.sweep()
        # Last, as a workflow that is started again no longer shows what a second run would have to name.
        for policy in newest:
            await self._workflows.restart_training(policy)
        return Recovered(waiting, len(rejudgements), tuple(newest), tuple(unknown), put_back)

    async def _lost_versions(self, newest: dict[str, int]) -> list[_LostVersion]:
        found = []
        for policy, version in newest.items():
            shown = await self._workflows.shown_version(policy)
            if shown is not None and shown > version:
                line = f"version {shown} of policy {policy} answered; PostgreSQL's newest version is {version}"
                found.append(_LostVersion(policy, shown, line))
        directories = [] if self._adapters is None else await self._adapters.directories()
        steps = await self._store.known_steps({directory.policy for directory in directories})
        # A step that PostgreSQL knows made the others: the sweep deletes what an attempt at it left behind.
        lost = [directory for directory in directories if (directory.policy, directory.n) not in steps]
        return found + [
            _LostVersion(directory.policy, directory.n, f"adapters/{directory.path}: PostgreSQL knows no such step")
            for directory in lost
        ]

    async def _unknown_sessions(self) -> list[str]:
        unknown: set[SessionId] = set()
        lost: dict[SessionId, set[TurnId]] = {}
        chunk: list[ToldTurns] = []

        async def check() -> None:
            known = await self._store.known_sessions([told.session for told in chunk])
            unknown.update(told.session for told in chunk if told.session not in known)
            stored = await self._known_turns([turn for told in chunk for turn in told.turns])
            for told in chunk:
                if missing := told.turns - stored:
                    lost.setdefault(told.session, set()).update(missing)
            chunk.clear()

        async for told in self._workflows.sessions():
            chunk.append(told)
            if len(chunk) == _CHUNK:
                await check()
        if chunk:
            await check()
        return [
            *(f"session {session}: PostgreSQL has no such session" for session in sorted(unknown)),
            *(_lost_turns(session, turns) for session, turns in sorted(lost.items()) if session not in unknown),
        ]

    async def _known_turns(self, turns: Sequence[TurnId]) -> frozenset[TurnId]:
        known: set[TurnId] = set()
        for first in range(0, len(turns), _CHUNK):
            known |= await self._store.known_turns(turns[first : first + _CHUNK])
        return frozenset(known)


def _lost_key(key: KeyOfTurns, turns: int, policies: Collection[str]) -> str:
    held = f"{turns} turns of it are on the disk"
    if key.policy not in policies:
        return (
            f"policy {key.policy}, with key {key.key}; {held}: make the policy again (`clawloop policy create "
            f"{key.policy}`) and run this once more, and they are stored"
        )
    return f"key {key.key} of policy {key.policy}; {held}, and are stored as those of a revoked key"


def _lost_turns(session: SessionId, turns: Collection[TurnId]) -> str:
    oldest = sorted(turns)[:_NAMED]
    names = ", ".join(map(str, oldest))
    more = f" and {len(turns) - len(oldest)} later ones" if len(turns) > len(oldest) else ""
    return f"session {session}: PostgreSQL lacks {len(turns)} of its turns: {names}{more}"


def recovery_of(database: Database, client: Client, settings: Settings) -> Recovery:
    folder, spool = settings.data / "adapters", settings.data / "spool"
    return Recovery(
        PostgresRecoveryStore(database),
        TemporalRecovery(client, TemporalNotifier.of(client, settings)),
        AdapterFolder(folder) if folder.is_dir() else None,
        StrandedTurns(spool, sealer_of(settings.encryption_key_file)) if spool.is_dir() else None,
    )
