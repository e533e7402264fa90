"""Telling a policy's training workflow that a batch waits.

Knows nothing about what makes a batch. Best effort: what is not told here keeps its mark in Postgres, and the sweep
tells it.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from activities.telling import Telling
from activities.training_ports import WorkAnnouncer, WorkStore
from clawloop.errors import AnnouncementFailed

log = logging.getLogger(__name__)


# A training workflow that was told takes its batch within seconds; one that was lost is begun anew.
TOLD_AGAIN_AFTER = timedelta(minutes=1)


class WorkTelling:
    def __init__(self, store: WorkStore, announcer: WorkAnnouncer) -> None:
        self._store = store
        self._announcer = announcer

    async def tell(self, policy: str | None) -> None:
        """Tell the policy's workflow; None: there is nothing to tell."""
        if policy is None:
            return
        try:
            await self._announcer.announce_work(policy)
        except AnnouncementFailed as error:
            log.warning("a batch is left to the sweep", extra={"policy": policy, "why": str(error)})
            return
        await self._store.mark_work_told([policy])

    async def tell_again(self) -> int:
        """Tell every workflow that was not told, or long ago; how many there were.

        Raises:
            StoreUnavailable
            AnnouncementFailed: of the policies it names; the others were told, and the next sweep tries again.
        """
        policies = await self._store.untold_work(TOLD_AGAIN_AFTER)
        telling = Telling[str]("policy")
        if told := await telling.tell(policies, str, self._announcer.announce_work):
            await self._store.mark_work_told(told)
        telling.require_that_all_hear()
        return len(policies)
