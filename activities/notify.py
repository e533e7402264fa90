"""Telling many workflows, side by side; one that cannot be told keeps nobody from the others.

Knows nothing about what they are told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Generic, TypeVar

from clawloop.errors import SignalFailed

log = logging.getLogger(__name__)

# Workflows told side by side; a signal takes 10 ms.
AT_ONCE = 16
# So many that cannot be told are not these workflows' fault; each may take 3 s, and the next sweep comes in a minute.
MAX_FAILED = 2 * AT_ONCE

Item = TypeVar("Item")
Whom = TypeVar("Whom")


class Notifier(Generic[Whom]):
    """
    Args:
        what: whose workflows they are: `session`, `policy`, `engine`.

    Attributes:
        stuck: those that could not be told, each with the reason.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.stuck: dict[Whom, SignalFailed] = {}

    async def tell(
        self, items: Sequence[Item], whom: Callable[[Item], Whom], tell: Callable[[Item], Awaitable[None]]
    ) -> list[Item]:
        """Tell each item; those of one workflow one after the other, in their order, up to the first that fails.

        Returns:
            Those that were told.
        """
        at_once = asyncio.Semaphore(AT_ONCE)
        told: list[Item] = []

        async def tell_all(of: Whom, own: list[Item]) -> None:
            async with at_once:
                for item in own:
                    if self._too_many_failed:
                        return
                    try:
                        await tell(item)
                    except SignalFailed as error:
                        log.warning(
                            f"a {self._what} is left to the next sweep",
                            extra={f"{self._what}_id": str(of), "why": str(error)},
                        )
                        self.stuck[of] = error
                        return
                    told.append(item)

        order = {whom(item): place for place, item in reversed(list(enumerate(items)))}
        sorted_items = sorted(items, key=lambda item: order[whom(item)])  # stable: each workflow's keep their order
        async with asyncio.TaskGroup() as group:
            for of, own in groupby(sorted_items, key=whom):
                group.create_task(tell_all(of, list(own)))
        return told

    def raise_if_most_failed(self) -> None:
        """
        Raises:
            SignalFailed: so many cannot be told that it is of no use to go on now.
        """
        if self._too_many_failed:
            raise next(iter(self.stuck.values()))

    def raise_if_any_failed(self) -> None:
        """
        Raises:
            SignalFailed: of those it names; the others were told, unless so many failed that it gave up.
        """
        if self.stuck:
            raise SignalFailed("; ".join(sorted(f"{self._what} {of}: {why}" for of, why in self.stuck.items())))

    @property
    def _too_many_failed(self) -> bool:
        return len(self.stuck) > MAX_FAILED
