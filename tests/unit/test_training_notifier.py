"""Policies are told of waiting batches one by one: what cannot be told keeps no other from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta

import pytest

from activities.notify import AT_ONCE, MAX_FAILED, Notifier
from activities.training.notifier import TrainingNotifier
from clawloop.errors import SignalFailed


class Work:
    """Satisfies `activities.training.ports.WorkStore` and `WorkNotifier`.

    Args:
        untold: policies with work that were not told.
        stuck: policies whose workflow cannot be told.
    """

    def __init__(self, untold: set[str], stuck: set[str]) -> None:
        self.untold = untold
        self.stuck = stuck

    async def pending_work(self, age: timedelta) -> list[str]:
        del age
        return sorted(self.untold)

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        self.untold -= set(policies)

    async def notify_work(self, policy: str) -> None:
        if policy in self.stuck:
            raise SignalFailed("Temporal: too many signals")


async def tell_each(names: Iterable[str], tell: Callable[[str], Awaitable[None]]) -> None:
    telling = Notifier[str]("policy")
    await telling.tell(list(names), str, tell)
    telling.raise_if_any_failed()


async def test_a_policy_that_cannot_be_told_keeps_no_other_from_it_and_is_named() -> None:
    work = Work(untold={"ada", "bob", "cyd"}, stuck={"ada", "cyd"})
    telling = TrainingNotifier(work, work)
    with pytest.raises(SignalFailed, match=r"^policy ada: Temporal: too many signals; policy cyd: Temporal: "):
        await telling.notify_pending()
    assert work.untold == {"ada", "cyd"}
    work.stuck = set()
    assert await telling.notify_pending() == 2
    assert work.untold == set()


async def test_a_batch_that_cannot_be_told_is_left_to_the_sweep() -> None:
    work = Work(untold={"ada", "bob"}, stuck={"ada"})
    telling = TrainingNotifier(work, work)
    for policy in ("ada", "bob", None):
        await telling.tell(policy)
    assert work.untold == {"ada"}


async def test_no_more_are_told_at_once_than_sessions_are() -> None:
    now, most = 0, 0

    async def tell(name: str) -> None:
        nonlocal now, most
        del name
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    await tell_each(map(str, range(5 * AT_ONCE)), tell)
    assert most == AT_ONCE


async def test_where_hardly_any_can_be_told_the_rest_is_left_to_the_next_sweep() -> None:
    tried: list[str] = []

    async def tell(name: str) -> None:
        tried.append(name)
        await asyncio.sleep(0)
        raise SignalFailed("Temporal: deadline exceeded")

    with pytest.raises(SignalFailed):
        await tell_each(map(str, range(20 * AT_ONCE)), tell)
    assert MAX_FAILED < len(tried) <= MAX_FAILED + AT_ONCE


async def test_one_that_takes_long_does_not_make_the_others_wait() -> None:
    others, told = asyncio.Barrier(4), list[str]()

    async def tell(name: str) -> None:
        await others.wait()
        told.append(name)

    async with asyncio.timeout(30):  # each waits for the three others: told in turn, none would ever be
        await tell_each(["ada", "bob", "cyd", "dan"], tell)
    assert sorted(told) == ["ada", "bob", "cyd", "dan"]
