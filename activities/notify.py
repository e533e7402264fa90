"""Notifies workflows: many concurrently, and a policy's training workflow once a batch waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from clawloop.core.contracts.notices import BatchWaits, Notifier
from clawloop.core.errors import SignalFailed

# Many -----------------------------------------------------------------------------------------------------------------
# Notifies many workflows concurrently; one that cannot be notified does not delay the others.

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


# Training -------------------------------------------------------------------------------------------------------------
# Notifies a policy's training workflow that a batch waits. Best effort: the sweep retries from PostgreSQL.

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
