"""Telling a policy's training workflow that a batch waits.

Knows nothing about what makes a batch. Best effort: what is not told here keeps its mark in Postgres, and the sweep
tells it.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from activities.notify import Notifier
from activities.training.ports import WorkNotifier, WorkStore
from clawloop.errors import SignalFailed

log = logging.getLogger(__name__)


# A training workflow that was told takes its batch within seconds; one that was lost is begun anew.
RENOTIFY_AFTER = timedelta(minutes=1)


class TrainingNotifier:
    def __init__(self, store: WorkStore, notifier: WorkNotifier) -> None:
        self._store = store
        self._notifier = notifier

    async def tell(self, policy: str | None) -> None:
        """Tell the policy's workflow; None: there is nothing to tell."""
        if policy is None:
            return
        try:
            await self._notifier.notify_work(policy)
        except SignalFailed as error:
            log.warning("a batch is left to the sweep", extra={"policy": policy, "why": str(error)})
            return
        await self._store.mark_work_notified([policy])

    async def notify_pending(self) -> int:
        """Tell every workflow that was not told, or long ago; how many there were.

        Raises:
            StoreUnavailable
            SignalFailed: of the policies it names; the others were told, and the next sweep tries again.
        """
        policies = await self._store.pending_work(RENOTIFY_AFTER)
        telling = Notifier[str]("policy")
        if told := await telling.tell(policies, str, self._notifier.notify_work):
            await self._store.mark_work_notified(told)
        telling.raise_if_any_failed()
        return len(policies)
