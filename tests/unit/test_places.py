"""A bound on what is in flight on an engine, and who is next."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from clawloop.serving.rotation import Places


def _any(engine: str) -> bool:
    return True


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Bench:
    """One engine `a`, and the order in which requests got their places."""

    def __init__(self, limit: int) -> None:
        self.places = Places(limit)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, name: str, owner: str, amount: int = 1, seconds: float = 60) -> asyncio.Task[None]:
        async def asking() -> None:
            await self.places.wait(["a"], owner, amount, _any, seconds)
            self.order.append(name)

        self.tasks.append(asyncio.create_task(asking()))
        return self.tasks[-1]

    async def end(self, owner: str, amount: int = 1) -> None:
        self.places.give_back("a", owner, amount)
        await _settled()


async def test_a_key_with_a_thousand_requests_delays_another_key_by_one_reply() -> None:
    bench = Bench(2)
    for _ in range(2):
        bench.places.take("a", "busy", 1)
    for n in range(1000):
        bench.ask(f"busy {n}", "busy")
    await _settled()
    bench.ask("other", "other")
    await _settled()
    assert bench.order == []
    await bench.end("busy")
    assert bench.order == ["other"]
    await bench.end("busy")
    assert bench.order == ["other", "busy 0"]
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)
    # Nobody waits any more, and what was given is held.
    assert not bench.places.is_free("a", 1)
    await bench.end("other")
    assert bench.places.is_free("a", 1)


async def test_keys_share_an_engine_by_what_they_hold_and_not_by_requests() -> None:
    bench = Bench(4)
    for owner in ("many", "many", "many", "few"):
        bench.places.take("a", owner, 1)
    for n in range(4):
        bench.ask(f"many {n}", "many")
        bench.ask(f"few {n}", "few")
    await _settled()
    await bench.end("many")  # 2 of each now
    await bench.end("few")
    await bench.end("many")
    assert bench.order == ["few 0", "few 1", "many 0"]


async def test_who_wants_several_places_is_not_passed_by_those_who_want_one() -> None:
    bench = Bench(3)
    for owner in ("x", "y", "z"):
        bench.places.take("a", owner, 1)
    bench.ask("three", "large", amount=3)
    await _settled()
    bench.ask("one", "small")
    await bench.end("x")
    await bench.end("y")
    assert bench.order == []
    await bench.end("z")
    assert bench.order == ["three"]
    await bench.end("large", amount=3)
    assert bench.order == ["three", "one"]


async def test_a_request_for_more_places_than_there_are_gets_all() -> None:
    bench = Bench(2)
    assert bench.places.is_free("a", 9)
    bench.places.take("a", "large", 9)
    assert not bench.places.is_free("a", 1)
    await bench.end("large", amount=9)
    assert bench.places.is_free("a", 2)


async def test_a_client_that_leaves_in_the_moment_of_its_turn_takes_no_place_with_it() -> None:
    bench = Bench(1)
    bench.places.take("a", "x", 1)
    leaving = bench.ask("leaving", "leaving")
    staying = bench.ask("staying", "staying")
    await _settled()
    bench.places.give_back("a", "x", 1)  # the place is given, and the client's task has not run yet
    leaving.cancel()
    await _settled()
    assert bench.order == ["staying"]
    assert leaving.cancelled()
    await staying
    # And the other way round: it has left, and its task has not run yet.
    leaving, staying = bench.ask("leaving", "leaving"), bench.ask("staying too", "other")
    await _settled()
    leaving.cancel()
    bench.places.give_back("a", "staying", 1)
    await _settled()
    assert bench.order == ["staying", "staying too"]
    assert not bench.places.is_free("a", 1)


async def test_who_waits_too_long_is_told_so_and_holds_nothing() -> None:
    bench = Bench(1)
    bench.places.take("a", "x", 1)
    with pytest.raises(TimeoutError):
        await bench.ask("late", "late", seconds=0.01)
    await bench.end("x")
    assert bench.places.is_free("a", 1)


async def test_a_free_engine_is_not_kept_for_who_cannot_use_it() -> None:
    places = Places(1)
    places.take("a", "x", 1)
    only_a = asyncio.create_task(places.wait(["a"], "picky", 1, lambda engine: engine == "a", 60))
    await _settled()
    assert await places.wait(["a", "b"], "other", 1, _any, 60) == "b"
    only_a.cancel()
    with suppress(asyncio.CancelledError):
        await only_a


async def test_who_wants_several_places_keeps_those_of_one_engine_only() -> None:
    places = Places(3)
    for engine in ("a", "b"):
        places.take(engine, "long", 1)
    large = asyncio.create_task(places.wait(["a", "b"], "large", 3, _any, 60))
    await _settled()
    # One engine empties for it; the other one has two places for the others.
    got = [await places.wait(["a", "b"], f"small {n}", 1, _any, 60) for n in range(2)]
    assert got == ["b", "b"]
    assert not large.done()
    places.give_back("a", "long", 1)
    assert await large == "a"


async def test_an_engine_that_empties_first_is_taken_and_the_kept_one_given_back() -> None:
    places = Places(2)
    for engine in ("a", "b"):
        places.take(engine, "long", 1)
    large = asyncio.create_task(places.wait(["a", "b"], "large", 2, _any, 60))
    await _settled()
    small = asyncio.create_task(places.wait(["a"], "small", 1, lambda engine: engine == "a", 60))
    await _settled()
    assert not small.done()  # the place on a is kept
    places.give_back("b", "long", 1)
    assert await large == "b"
    assert await small == "a"


async def test_an_engine_that_was_kept_is_free_again_when_the_request_leaves() -> None:
    places = Places(2)
    places.take("a", "long", 1)
    large = asyncio.create_task(places.wait(["a"], "large", 2, _any, 60))
    await _settled()
    small = asyncio.create_task(places.wait(["a"], "small", 1, _any, 60))
    await _settled()
    assert not small.done()
    large.cancel()
    assert await small == "a"


async def test_a_request_that_no_engine_can_take_delays_no_other_of_its_owner() -> None:
    places = Places(1)
    places.take("a", "x", 1)
    stale = asyncio.create_task(places.wait(["a"], "one", 1, lambda engine: engine == "gone", 60))
    current = asyncio.create_task(places.wait(["a"], "one", 1, _any, 60))
    await _settled()
    places.give_back("a", "x", 1)
    assert await current == "a"
    stale.cancel()
    with suppress(asyncio.CancelledError):
        await stale
