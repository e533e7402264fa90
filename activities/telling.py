"""Telling many sessions' workflows, side by side; one that cannot be told keeps nobody from the others.

Knows nothing about what they are told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import TypeVar

from clawloop.errors import AnnouncementFailed
from clawloop.ids import SessionId

log = logging.getLogger(__name__)

# Sessions told side by side; a signal takes 10 ms.
AT_ONCE = 16
# So many that cannot be told are not these sessions' fault; each may take 3 s, and the next sweep comes in a minute.
MOST_STUCK = 2 * AT_ONCE

Item = TypeVar("Item")


class Telling:
    """
    Attributes:
        stuck: the sessions that could not be told, each with the reason.
    """

    def __init__(self) -> None:
        self.stuck: dict[SessionId, AnnouncementFailed] = {}

    async def tell(
        self, items: Sequence[Item], session: Callable[[Item], SessionId], tell: Callable[[Item], Awaitable[None]]
    ) -> list[Item]:
        """Tell each item; those of one session one after the other, in their order, up to the first that fails.

        Returns:
            Those that were told.
        """
        at_once = asyncio.Semaphore(AT_ONCE)
        told: list[Item] = []

        async def tell_all(of: SessionId, own: list[Item]) -> None:
            async with at_once:
                for item in own:
                    if self._gave_up:
                        return
                    try:
                        await tell(item)
                    except AnnouncementFailed as error:
                        log.warning(
                            "a session is left to the next sweep", extra={"session_id": str(of), "why": str(error)}
                        )
                        self.stuck[of] = error
                        return
                    told.append(item)

        order = {session(item): place for place, item in reversed(list(enumerate(items)))}
        sorted_items = sorted(items, key=lambda item: order[session(item)])  # stable: each session keeps its order
        async with asyncio.TaskGroup() as group:
            for of, own in groupby(sorted_items, key=session):
                group.create_task(tell_all(of, list(own)))
        return told

    def require_that_most_hear(self) -> None:
        """
        Raises:
            AnnouncementFailed: so many cannot be told that it is of no use to go on now.
        """
        if self._gave_up:
            raise next(iter(self.stuck.values()))

    @property
    def _gave_up(self) -> bool:
        return len(self.stuck) > MOST_STUCK
