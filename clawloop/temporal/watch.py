"""Whether Temporal answers, asked every few seconds and told to people; nothing is decided by it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import Client

from clawloop.errors import SignalFailed
from clawloop.operations.overview import NO_TEMPORAL
from clawloop.temporal.deadline import temporal_deadline

# A person who looks sees an outage, and its end, within seconds; a call costs a millisecond.
EVERY_SECONDS = 5.0
_ASKING = timedelta(seconds=3)
AWAY = "Temporal does not answer: chats go on and are recorded; judging and training wait until it is back"


class TemporalWatch:
    """Use as an async context manager. Satisfies `clawloop.operations.overview.TemporalHealth`.

    Args:
        client: may be lazy; None: none is configured.
    """

    def __init__(self, client: Client | None, every_seconds: float = EVERY_SECONDS) -> None:
        self._client = client
        self._every_seconds = every_seconds
        self._answers = True  # until the first answer, or its absence, says something else
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TemporalWatch:
        if self._client is not None:
            self._asking = asyncio.create_task(self._ask_again_and_again(self._client))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    @property
    def known_problem(self) -> str | None:
        if self._client is None:
            return NO_TEMPORAL
        return None if self._answers else AWAY

    async def problem(self) -> str | None:
        return self.known_problem

    async def _ask_again_and_again(self, client: Client) -> None:
        while True:
            try:
                async with temporal_deadline(_ASKING):
                    await client.service_client.check_health()
                self._answers = True
            except SignalFailed:
                self._answers = False
            await asyncio.sleep(self._every_seconds)
