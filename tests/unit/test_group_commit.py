"""Calls that come while a transaction runs share the next one, and errors stay with their own call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from clawloop.core.errors import RecordUnusable, StoreContended, StoreTimedOut, StoreUnavailable
from db.group_commit import ALONE, Answer, GroupCommit


class Transactions:
    """Answers a call by its name; records which calls shared a transaction.

    Args:
        fails: calls whose transaction fails, and how.
        alone: calls that need a transaction of their own.
    """

    def __init__(self, fails: dict[str, Exception] | None = None, alone: Sequence[str] = ()) -> None:
        self.fails = fails or {}
        self.needs_own = alone
        self.shared: list[list[str]] = []
        self.free = asyncio.Event()
        self.free.set()

    async def together(self, calls: Sequence[str]) -> list[Answer[str]]:
        self.shared.append(list(calls))
        await self.free.wait()
        for call in calls:
            if call in self.fails:
                raise self.fails[call]
        return [ALONE if call in self.needs_own and len(calls) > 1 else call.upper() for call in calls]

    @property
    def apart(self) -> list[str]:
        """The calls that got a transaction of their own."""
        return [calls[0] for calls in self.shared if len(calls) == 1]

    def grouped(self) -> GroupCommit[str, str]:
        return GroupCommit[str, str](self.together, lambda call: call[0])


async def test_calls_that_come_together_share_a_transaction() -> None:
    done = Transactions()
    grouped = done.grouped()
    assert await grouped.run("a") == "A"
    assert await asyncio.gather(*map(grouped.run, "bcd")) == ["B", "C", "D"]
    assert done.shared == [["a"], ["b", "c", "d"]]


async def test_calls_that_come_while_one_runs_share_the_next() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    calls = [asyncio.create_task(grouped.run("a"))]
    while not done.shared:
        await asyncio.sleep(0)
    calls += [asyncio.create_task(grouped.run(call)) for call in "bc"]
    await asyncio.sleep(0)
    done.free.set()
    assert await asyncio.gather(*calls) == ["A", "B", "C"]
    assert done.shared == [["a"], ["b", "c"]]


async def test_two_calls_of_one_key_come_one_after_the_other() -> None:
    done = Transactions()
    assert await asyncio.gather(*map(done.grouped().run, ["a1", "a2", "b1"])) == ["A1", "A2", "B1"]
    assert done.shared == [["a1", "b1"], ["a2"]]


async def test_an_error_stays_with_its_call() -> None:
    done = Transactions({"b": RecordUnusable("b")})
    grouped = done.grouped()
    answers = await asyncio.gather(*map(grouped.run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "b", "C"]
    assert done.apart == ["a", "b", "c"]


async def test_contention_of_one_call_does_not_fail_the_others() -> None:
    done = Transactions({"b": StoreContended("locked")})
    answers = await asyncio.gather(*map(done.grouped().run, "ab"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "locked"]


async def test_a_shared_transaction_that_takes_too_long_is_tried_by_its_calls_alone() -> None:
    done = Transactions({"b": StoreTimedOut("canceling statement due to statement timeout")})
    answers = await asyncio.gather(*map(done.grouped().run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "canceling statement due to statement timeout", "C"]
    assert done.apart == ["a", "b", "c"]


async def test_where_postgresql_is_away_nobody_tries_it_again() -> None:
    done = Transactions({"b": StoreUnavailable("away")})
    answers = await asyncio.gather(*map(done.grouped().run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["away"] * 3
    assert done.apart == []


async def test_a_call_that_is_not_ordinary_gets_its_own_transaction() -> None:
    done = Transactions(alone=["b"])
    assert await asyncio.gather(*map(done.grouped().run, "abc")) == ["A", "B", "C"]
    assert done.apart == ["b"]


async def test_a_transaction_that_waits_does_not_hold_up_the_next() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    first = asyncio.create_task(grouped.run("a"))
    second = asyncio.create_task(grouped.run("b"))
    await asyncio.sleep(0)
    third = asyncio.create_task(grouped.run("c"))
    while len(done.shared) < 2:  # the first transaction has not ended
        await asyncio.sleep(0.01)
    done.free.set()
    assert [await first, await second, await third] == ["A", "B", "C"]


async def test_a_cancelled_caller_leaves_the_others_alone() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    gone, stays = asyncio.create_task(grouped.run("a")), asyncio.create_task(grouped.run("b"))
    while not done.shared:
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    done.free.set()
    assert await stays == "B"
