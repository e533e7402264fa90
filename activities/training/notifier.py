"""Notifies a policy's training workflow that a batch waits. Best effort: the sweep retries from PostgreSQL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from activities.notify import ConcurrentNotifier
from clawloop.contracts.notices import BatchWaits, Notifier
from clawloop.errors import SignalFailed

log = logging.getLogger(__name__)

# A running workflow claims its batch within seconds of the signal; a lost one is started by the next signal.
RENOTIFY_AFTER = timedelta(minutes=1)


class WorkStore(Protocol):
    """Stores which training workflows need a signal that a batch waits. Every call raises StoreUnavailable if
    PostgreSQL does not answer in time."""

    async def pending_work(self, age: timedelta) -> list[str]:
        """Policies with a waiting batch whose workflow was not notified, or longer than `age` ago.

        While a step is claimed, 60 times `age`. Also, after 10 times `age`, those whose active version is not the one
        that should answer.
        """

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        """Record that the policies' workflows were notified now."""


class TrainingNotifier:
    def __init__(self, store: WorkStore, notifier: Notifier) -> None:
        self._store = store
        self._notifier = notifier

    async def notify(self, policy: str | None) -> None:
        """Notify the policy's workflow; does nothing for None."""
        if policy is None:
            return
        try:
            await self._notifier.notify(BatchWaits(policy))
        except SignalFailed as error:
            log.warning("signal failed, the sweep retries: a batch waits", extra={"policy": policy, "why": str(error)})
            return
        await self._store.mark_work_notified([policy])

    async def notify_pending(self) -> int:
        """Notify each workflow with work that was never notified, or long ago; the number of policies.

        Raises:
            StoreUnavailable
            SignalFailed: names the policies. The others were notified, and the next sweep retries.
        """
        policies = await self._store.pending_work(RENOTIFY_AFTER)
        notifier = ConcurrentNotifier[str]("policy")
        notified = await notifier.notify_each(policies, str, lambda policy: self._notifier.notify(BatchWaits(policy)))
        if notified:
            await self._store.mark_work_notified(notified)
        notifier.raise_if_any_failed()
        return len(policies)
