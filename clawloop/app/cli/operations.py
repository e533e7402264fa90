"""Operations for the command line; connects to Temporal only once PostgreSQL has stored the change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clawloop.app.cli.terminal import running_settings, with_database, with_policy
from clawloop.core.errors import SignalFailed

if TYPE_CHECKING:
    from temporalio.client import Client

    from clawloop.app.processes.operations import Operations
    from clawloop.app.temporal.server import TemporalEnvironmentWorkers
    from clawloop.core.contracts.notices import Notice, Notifier
    from clawloop.core.ids import RolloutGroupId
    from clawloop.core.settings import Settings
    from clawloop.operations.workflow_links import WorkflowLinks
    from db.database import Database

Result = TypeVar("Result")

# A server that listens accepts a connection at once; a far one within some tenths of a second.
TEMPORAL_CONNECT_SECONDS = 2.0


def with_operations(data: Path | None, work: Callable[[Operations], Coroutine[Any, Any, Result]]) -> Result:
    """Run `work` with the operations on the database of the settings."""
    return with_database(data, lambda database: work(_operations(database, data)))


def with_policy_operations(
    data: Path | None, policy: str | None, work: Callable[[Operations, str], Coroutine[Any, Any, Result]]
) -> Result:
    """Run `work` with the operations and the policy; see `with_policy`."""
    return with_policy(data, policy, lambda database, name: work(_operations(database, data), name))


def _operations(database: Database, data: Path | None) -> Operations:
    from clawloop.app.processes.operations import Operations

    settings = running_settings(data)
    temporal = _TemporalOnDemand(settings)
    return Operations(database, settings, temporal, temporal)


def links_of(data: Path | None) -> WorkflowLinks:
    """Links into Temporal's UI."""
    from clawloop.app.processes.endpoints import workflow_links

    return workflow_links(running_settings(data))


class _TemporalOnDemand:
    """Satisfies `Notifier` and `EnvironmentWorkers`; connects when it is called."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._notifier: Notifier | None = None

    async def notify(self, notice: Notice) -> None:
        if self._notifier is None:
            client = await self._client()
            from clawloop.app.temporal.notifier import TemporalNotifier

            self._notifier = TemporalNotifier.of(client, self._settings)
        await self._notifier.notify(notice)

    async def asks_for_work(self, environment: str) -> bool:
        return await (await self._environment_workers()).asks_for_work(environment)

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        return await (await self._environment_workers()).has_work(groups)

    async def _environment_workers(self) -> TemporalEnvironmentWorkers:
        client = await self._client()
        from clawloop.app.temporal.server import TemporalEnvironmentWorkers

        return TemporalEnvironmentWorkers(client)

    async def _client(self) -> Client:
        return await connect_temporal(self._settings)


class TemporalProbe:
    """True if a server listens at Temporal's address."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def problem(self) -> str | None:
        from clawloop.app.processes.endpoints import temporal_address

        # A machine that is configured for the database only has no address of Temporal.
        if (address := temporal_address(self._settings)) is None:
            return None
        try:
            await _reach(address)
        except SignalFailed as error:
            return str(error)
        return None


async def connect_temporal(settings: Settings) -> Client:
    """A lazy client, if a server listens at Temporal's address.

    The connection is tried before the client is imported, which takes a second or two.

    Raises:
        SignalFailed: there is no Temporal, or it does not answer.
    """
    from clawloop.app.processes.endpoints import temporal_address

    address = temporal_address(settings)
    if address is None:
        raise SignalFailed("no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal")
    await _reach(address)
    from clawloop.app.temporal.plugin import connect

    return await connect(address, lazy=True)


async def _reach(address: str) -> None:
    """
    Raises:
        SignalFailed: nothing listens at this address.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TEMPORAL_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        raise SignalFailed(f"Temporal does not answer at {address}") from None
    writer.close()
