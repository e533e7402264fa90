"""Which engine gets a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Gauge

from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import EnginesBusy, EngineUnavailable
from clawloop.serving.rotation import AFFINITY_SLACK, MISSING_SECONDS, Rotation


def _engine(name: str, *versions: int, draining: bool = False) -> Engine:
    return Engine(name, f"http://{name}", {"default": frozenset(versions)}, draining)


def _rotation(*engines: Engine, hold_seconds: float = 0.05, hold_limit: int = 2) -> Rotation:
    held = Gauge("held", "held", registry=CollectorRegistry())
    rotation = Rotation(lambda: engines, hold_seconds=hold_seconds, hold_limit=hold_limit, held=held)
    for engine in engines:
        rotation.mark(engine.id, healthy=True)
    return rotation


async def test_only_an_engine_that_has_the_version_is_chosen() -> None:
    rotation = _rotation(_engine("a", 1), _engine("b", 2))
    for session in range(20):
        assert (await rotation.acquire("default", 2, str(session))).id == "b"
    assert rotation.has_version("default", 1)
    assert not rotation.has_version("default", 3)
    assert rotation.has_version("default", 0)


async def test_draining_and_unhealthy_engines_get_nothing() -> None:
    rotation = _rotation(_engine("a", draining=True), _engine("b"), _engine("c"))
    rotation.mark("c", healthy=False)
    assert {(await rotation.acquire("default", 0, str(n))).id for n in range(20)} == {"b"}


async def test_a_session_stays_on_its_engine_until_that_is_much_busier() -> None:
    rotation = _rotation(_engine("a"), _engine("b"))
    chosen = [(await rotation.acquire("default", 0, "session")).id for _ in range(AFFINITY_SLACK + 2)]
    home = chosen[0]
    assert chosen[: AFFINITY_SLACK + 1] == [home] * (AFFINITY_SLACK + 1)
    assert chosen[-1] != home


async def test_removing_an_engine_moves_only_its_sessions() -> None:
    three, two = _rotation(_engine("a"), _engine("b"), _engine("c")), _rotation(_engine("a"), _engine("b"))
    moved: Counter[str] = Counter()
    for session in range(60):
        before, after = await three.acquire("default", 0, str(session)), await two.acquire("default", 0, str(session))
        three.release(before)
        two.release(after)
        if before.id != after.id:
            moved[before.id] += 1
    assert set(moved) == {"c"}


async def test_a_failed_engine_is_avoided_while_there_is_another() -> None:
    rotation = _rotation(_engine("a"), _engine("b"))
    assert (await rotation.acquire("default", 0, "s", avoid="a")).id == "b"
    alone = _rotation(_engine("a"))
    assert (await alone.acquire("default", 0, "s", avoid="a")).id == "a"


async def test_a_request_waits_until_an_engine_is_healthy() -> None:
    rotation = _rotation(_engine("a"), hold_seconds=5)
    rotation.mark("a", healthy=False)
    waiting = asyncio.create_task(rotation.acquire("default", 0, "s"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    rotation.mark("a", healthy=True)
    assert (await waiting).id == "a"


async def test_waiting_is_bounded_in_time_and_number() -> None:
    rotation = _rotation(_engine("a"))
    rotation.mark("a", healthy=False)
    waiting = [asyncio.create_task(rotation.acquire("default", 0, "s")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="2 requests wait"):
        await rotation.acquire("default", 0, "s")
    for task in waiting:
        with pytest.raises(EngineUnavailable, match="no engine could take"):
            await task


async def test_an_engine_that_lacks_a_version_gets_no_request_for_it_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("clawloop.serving.rotation.time", SimpleNamespace(monotonic=lambda: now))
    rotation = _rotation(_engine("a", 1, 2), _engine("b", 1), hold_seconds=30)
    rotation.mark_missing("a", "default", 1)
    assert {(await rotation.acquire("default", 1, str(n))).id for n in range(20)} == {"b"}
    assert (await rotation.acquire("default", 2, "s")).id == "a"
    rotation.mark_missing("b", "default", 1)
    waiting = asyncio.create_task(rotation.acquire("default", 1, "s"))
    now += MISSING_SECONDS - 0.1
    rotation.mark("a", healthy=True)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    now += 0.2
    rotation.mark("a", healthy=True)
    assert (await waiting).id in {"a", "b"}


async def test_requests_of_one_policy_do_not_take_all_places_of_another() -> None:
    rotation = _rotation(_engine("a", 1), hold_seconds=30, hold_limit=8)
    rotation.mark("a", healthy=False)
    waiting = [asyncio.create_task(rotation.acquire("one", 9, "s")) for _ in range(6)]  # no engine has version 9
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="6 requests wait"):
        await rotation.acquire("one", 9, "s")
    others = [asyncio.create_task(rotation.acquire("default", 1, "s")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="8 requests wait"):
        await rotation.acquire("default", 1, "s")
    rotation.mark("a", healthy=True)
    assert [(await other).id for other in others] == ["a", "a"]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_chats_wait_where_they_have_their_places_and_what_needs_none_does_not() -> None:
    held = Gauge("held", "held", registry=CollectorRegistry())
    engines = [_engine("a"), _engine("b")]
    rotation = Rotation(
        lambda: engines, hold_seconds=1, hold_limit=2, held=held, places=AFFINITY_SLACK, place_seconds=0.05
    )
    for engine in engines:
        rotation.mark(engine.id, healthy=True)

    async def ask(owner: str, choices: int = 1) -> Engine:
        return await rotation.acquire("default", 0, "session", owner=owner, choices=choices)

    # Home first, although it is the busier one; then the other one; and never more.
    got = [(await ask("x")).id for _ in range(2 * AFFINITY_SLACK)]
    assert sorted(Counter(got).values()) == [AFFINITY_SLACK, AFFINITY_SLACK]
    assert len(set(got[:AFFINITY_SLACK])) == 1
    with pytest.raises(EnginesBusy, match=f"among {AFFINITY_SLACK} "):
        await ask("x")
    await rotation.acquire("default", 0, "session")  # as a request for token ids
    waiting = asyncio.create_task(ask("y"))
    await asyncio.sleep(0)
    rotation.release(engines[1], owner="x", choices=1)
    assert (await waiting).id == "b"
    # An engine that is out of rotation gives its places to nobody; when it is back it does.
    waiting = asyncio.create_task(ask("y"))
    await asyncio.sleep(0)
    rotation.mark("a", healthy=False)
    rotation.release(engines[0], owner="x", choices=1)
    await asyncio.sleep(0)
    assert not waiting.done()
    rotation.mark("a", healthy=True)
    assert (await waiting).id == "a"


async def test_a_chat_that_waits_for_a_place_is_told_when_no_engine_has_its_version_any_more() -> None:
    held = Gauge("held", "held", registry=CollectorRegistry())
    engines = [_engine("a", 1, 2)]
    rotation = Rotation(lambda: engines, hold_seconds=0.1, hold_limit=2, held=held, places=1, place_seconds=60)
    rotation.mark("a", healthy=True)
    await rotation.acquire("default", 2, "session", owner="x", choices=1)
    lost, waiting = [
        asyncio.create_task(rotation.acquire("default", version, "session", owner="y", choices=1)) for version in (1, 2)
    ]
    await asyncio.sleep(0.15)
    assert not lost.done()  # while an engine could take it, only its places bound the wait
    engines[:] = [_engine("a", 2)]
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailable, match="no engine could take") as refused:
            await lost
    assert not isinstance(refused.value, EnginesBusy)
    assert not waiting.done()
    rotation.release(engines[0], owner="x", choices=1)
    assert (await waiting).id == "a"
