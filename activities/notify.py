"""Notifies many workflows concurrently; one that cannot be notified does not delay the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Generic, TypeVar

from clawloop.errors import SignalFailed

log = logging.getLogger(__name__)

# Workflows notified concurrently; a signal takes 10 ms.
CONCURRENCY = 16
# With more failures than this, Temporal is at fault, not the workflows. Each failure may take 3 s, and the next sweep
# comes within a minute.
MAX_FAILED = 2 * CONCURRENCY

Item = TypeVar("Item")
Key = TypeVar("Key")


class ConcurrentNotifier(Generic[Key]):
    """
    Args:
        kind: what the workflows belong to: `session`, `policy`, `engine`.

    Attributes:
        failed: keys of the workflows that could not be notified, each with its error.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.failed: dict[Key, SignalFailed] = {}

    async def notify_each(
        self, items: Sequence[Item], key_of: Callable[[Item], Key], notify: Callable[[Item], Awaitable[None]]
    ) -> list[Item]:
        """Call `notify` for each item. Items of one workflow go in their order, and stop at the first that fails.

        Returns:
            The items whose workflow was notified.
        """
        slots = asyncio.Semaphore(CONCURRENCY)
        notified: list[Item] = []

        async def notify_in_order(key: Key, items_of_key: list[Item]) -> None:
            async with slots:
                for item in items_of_key:
                    if self._too_many_failed:
                        return
                    try:
                        await notify(item)
                    except SignalFailed as error:
                        log.warning(
                            f"signal failed, the sweep retries: {self._kind}",
                            extra={f"{self._kind}_id": str(key), "why": str(error)},
                        )
                        self.failed[key] = error
                        return
                    notified.append(item)

        position = {key_of(item): index for index, item in reversed(list(enumerate(items)))}
        sorted_items = sorted(items, key=lambda item: position[key_of(item)])  # stable: the order within a key stays
        async with asyncio.TaskGroup() as group:
            for key, items_of_key in groupby(sorted_items, key=key_of):
                group.create_task(notify_in_order(key, list(items_of_key)))
        return notified

    def raise_if_most_failed(self) -> None:
        """
        Raises:
            SignalFailed: more than `MAX_FAILED` workflows could not be notified; going on is of no use now.
        """
        if self._too_many_failed:
            raise next(iter(self.failed.values()))

    def raise_if_any_failed(self) -> None:
        """
        Raises:
            SignalFailed: names the workflows. The others were notified, unless more than `MAX_FAILED` failed.
        """
        if self.failed:
            raise SignalFailed("; ".join(sorted(f"{self._kind} {key}: {error}" for key, error in self.failed.items())))

    @property
    def _too_many_failed(self) -> bool:
        return len(self.failed) > MAX_FAILED
