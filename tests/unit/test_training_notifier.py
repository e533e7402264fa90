"""Policies are notified of waiting batches one by one: a failed signal does not stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta

import pytest

from activities.notify import CONCURRENCY, MAX_FAILED, ConcurrentNotifier, TrainingNotifier
from clawloop.core.contracts.notices import BatchWaits, Notice
from clawloop.core.errors import SignalFailed


class Work:
    """Satisfies `activities.notify.WorkStore` and `Notifier`.

    Args:
        pending: policies with work that were not notified.
        failing: policies whose workflow cannot be notified.
    """

    def __init__(self, pending: set[str], failing: set[str]) -> None:
        self.pending = pending
        self.failing = failing

    async def pending_work(self, age: timedelta) -> list[str]:
        del age
        return sorted(self.pending)

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        self.pending -= set(policies)

    async def notify(self, notice: Notice) -> None:
        assert isinstance(notice, BatchWaits)
        if notice.policy in self.failing:
            raise SignalFailed("Temporal: too many signals")


async def notify_each(names: Iterable[str], notify: Callable[[str], Awaitable[None]]) -> None:
    notifier = ConcurrentNotifier[str]("policy")
    await notifier.notify_each(list(names), str, notify)
    notifier.raise_if_any_failed()


async def test_a_failed_signal_does_not_stop_the_others_and_is_named() -> None:
    work = Work(pending={"ada", "bob", "cyd"}, failing={"ada", "cyd"})
    notifier = TrainingNotifier(work, work)
    with pytest.raises(SignalFailed, match=r"^policy ada: Temporal: too many signals; policy cyd: Temporal: "):
        await notifier.notify_pending()
    assert work.pending == {"ada", "cyd"}
    work.failing = set()
    assert await notifier.notify_pending() == 2
    assert work.pending == set()


async def test_a_batch_whose_signal_failed_is_left_to_the_sweep() -> None:
    work = Work(pending={"ada", "bob"}, failing={"ada"})
    notifier = TrainingNotifier(work, work)
    for policy in ("ada", "bob", None):
        await notifier.notify(policy)
    assert work.pending == {"ada"}


async def test_no_more_than_the_limit_are_notified_concurrently() -> None:
    now, most = 0, 0

    async def notify(name: str) -> None:
        nonlocal now, most
        del name
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    await notify_each(map(str, range(5 * CONCURRENCY)), notify)
    assert most == CONCURRENCY


async def test_after_too_many_failures_the_rest_is_left_to_the_next_sweep() -> None:
    tried: list[str] = []

    async def notify(name: str) -> None:
        tried.append(name)
        await asyncio.sleep(0)
        raise SignalFailed("Temporal: deadline exceeded")

    with pytest.raises(SignalFailed):
        await notify_each(map(str, range(20 * CONCURRENCY)), notify)
    assert MAX_FAILED < len(tried) <= MAX_FAILED + CONCURRENCY


async def test_a_slow_workflow_does_not_delay_the_others() -> None:
    others, notified = asyncio.Barrier(4), list[str]()

    async def notify(name: str) -> None:
        await others.wait()
        notified.append(name)

    async with asyncio.timeout(30):  # each waits for the three others: one after the other, none would ever end
        await notify_each(["ada", "bob", "cyd", "dan"], notify)
    assert sorted(notified) == ["ada", "bob", "cyd", "dan"]
