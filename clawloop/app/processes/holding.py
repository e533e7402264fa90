"""Keeps the database for this orchestrator's Temporal server; ends the orchestrator where another server has it.

A server that lost its data is prepared anew, as at the orchestrator's start: it refuses all workflows until then. What
waited for the lost workflows is marked as never signalled, so that the sweep signals it to the new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import timedelta

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from clawloop.app.temporal.server import PREPARE_LIMIT, temporal_deadline
from clawloop.core.errors import SetupError, SignalFailed, StoreUnavailable
from db.database import Database
from db.temporal_server import RENEW_EVERY, TemporalServerStore

log = logging.getLogger(__name__)

# While it waits whether another server is gone: a live one is noticed within its next renewal.
LOOK_EVERY = timedelta(seconds=2)


async def namespace_id(client: Client) -> str:
    """
    Raises:
        RPCError: Temporal does not answer.
    """
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    return described.namespace_info.id


async def take_database(database: Database, client: Client) -> None:
    """Take the database for this Temporal server, because an operator says that the former server is gone.

    All work that waited for the former server's workflows is queued to be signalled again, once.

    Raises:
        SignalFailed: Temporal does not answer.
        StoreUnavailable: PostgreSQL does not answer.
    """
    async with temporal_deadline():
        current = await namespace_id(client)
    # To mark a hundred thousand turns takes longer than Temporal has for an answer.
    await TemporalServerStore(database).take(current)


class Holding:
    """
    Args:
        broken: set where another server has taken the database.
        prepare: makes what a server with an empty database lacks; idempotent, and raises RPCError.
    """

    def __init__(
        self,
        store: TemporalServerStore,
        client: Client,
        broken: asyncio.Event,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._client = client
        self._broken = broken
        self._prepare = prepare
        self._held: str | None = None
        self._prepared: str | None = None

    async def begin(self) -> None:
        """Hold the database, once the time of another server that has gone is over, and prepare the server.

        Raises:
            SetupError: another Temporal server has the database: its orchestrators say so meanwhile.
            RPCError: Temporal does not answer.
        """
        await self._hold_if_postgres_answers(self._wait_and_renew())
        await self._prepare_once()

    async def keep(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY.total_seconds())
            try:
                await self._hold_if_postgres_answers(self._renew())
                async with temporal_deadline(PREPARE_LIMIT):
                    await self._prepare_once()
            except SetupError as error:
                log.error("orchestrator ends", extra={"why": str(error)})
                self._broken.set()
                return
            except (SignalFailed, RPCError) as error:
                log.warning("the database's Temporal server is not renewed", extra={"why": str(error)})

    async def end(self) -> None:
        """Release the database, so that another Temporal server need not wait for this one's hold to expire."""
        if self._held is not None and not self._broken.is_set():
            try:
                await self._store.release(self._held)
            except StoreUnavailable as error:
                log.warning("the database is not released", extra={"why": str(error)})

    async def _hold_if_postgres_answers(self, holding: Awaitable[None]) -> None:
        """Await `holding`; without PostgreSQL continue all the same, since workflows do nothing and renewals follow."""
        try:
            await holding
        except StoreUnavailable as error:
            log.warning("PostgreSQL does not answer: its Temporal server is not renewed", extra={"why": str(error)})

    async def _wait_and_renew(self) -> None:
        seen_at = await self._store.seen_at()
        waited = False
        while True:
            try:
                return await self._renew()
            except SetupError as error:
                if await self._store.seen_at() != seen_at:
                    raise
                if not waited:
                    log.warning("waits to see if the other Temporal server is gone", extra={"why": str(error)})
                    waited = True
            await asyncio.sleep(LOOK_EVERY.total_seconds())

    async def _renew(self) -> None:
        # Asked each time: a Temporal server that lost its data reports another namespace id to the same orchestrators.
        current = await namespace_id(self._client)
        waiting = await self._store.hold(current, formerly=self._held)
        self._held = current
        if waiting is not None:
            log.warning(
                "Temporal is another server than before, or lost its data: the sweep signals again what waits",
                extra={"now": current, **asdict(waiting)},
            )

    async def _prepare_once(self) -> None:
        """Prepare the server, unless that was done since it got its data."""
        current = await namespace_id(self._client)
        if current == self._prepared:
            return
        await self._prepare()
        self._prepared = current
