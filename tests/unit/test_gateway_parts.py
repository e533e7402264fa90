"""Parts of a gateway: rotation, places, readiness, proxies, its inherited socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from starlette.types import Receive, Scope, Send

from clawloop.app.local.checks import choose_port
from clawloop.app.processes.gateway import GatewayReadiness, server_config
from clawloop.app.processes.listener import inherited_socket, systemd_socket
from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import EnginesBusy, EngineUnavailable, SetupError
from clawloop.core.settings import Settings, read_settings
from clawloop.serving.chat import ChatEngines
from clawloop.serving.rotation import AFFINITY_SLACK, MISSING_SECONDS, Places, Rotation
from db.database import BACKGROUND_LIMIT, Database

# Which engine gets a request.


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


# A bound on what is in flight on an engine, and who is next.


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


# When a gateway is not ready, and the reasons it gives.

ENGINE = Engine("e0", "http://e0", {}, False)


@asynccontextmanager
async def _readiness(
    database_url: str, *, engine_healthy: bool, draining: bool = False, full: bool = False, engine: Engine = ENGINE
) -> AsyncIterator[GatewayReadiness]:
    def engines() -> Sequence[Engine]:
        return [engine]

    held = Gauge("held", "held", registry=CollectorRegistry())
    rotation = Rotation(engines, hold_seconds=1, hold_limit=1, held=held)
    rotation.mark(ENGINE.id, healthy=engine_healthy)
    database = Database(database_url, BACKGROUND_LIMIT)
    try:
        chat_engines = ChatEngines(rotation, engines)
        yield GatewayReadiness(database, chat_engines, engines, lambda: draining, lambda: full)
    finally:
        await database.close()


async def test_a_gateway_with_a_current_schema_and_a_healthy_engine_is_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True) as readiness:
        assert await readiness.problems() == []


async def test_a_draining_gateway_is_not_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True, draining=True) as readiness:
        assert await readiness.problems() == ["this gateway is being stopped"]


async def test_a_gateway_that_may_lose_turns_is_not_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True, full=True) as readiness:
        [problem] = await readiness.problems()
    assert "make room" in problem


async def test_an_outdated_schema_is_named_with_the_remedy(empty_postgres_url: str) -> None:
    async with _readiness(empty_postgres_url, engine_healthy=True) as readiness:
        [problem] = await readiness.problems()
    assert "schema" in problem
    assert "clawloop migrate" in problem


async def test_an_unhealthy_engine_is_named(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=False) as readiness:
        [problem] = await readiness.problems()
    assert problem.startswith("no engine answers: it is starting")


async def test_a_database_that_is_away_is_named_without_user_and_address() -> None:
    port = choose_port("nobody", "127.0.0.1", 0, "")
    url = f"postgresql://secret-user:secret-word@127.0.0.1:{port}/secret-name"
    async with _readiness(url, engine_healthy=False) as readiness:
        store, engine = await readiness.problems()
    assert store.startswith("PostgreSQL does not answer")
    assert not any(secret in store for secret in ("secret", "127.0.0.1", str(port)))
    assert engine.startswith("no engine answers")


async def test_drained_engines_are_named_with_the_remedy(postgres_url: str) -> None:
    drained = replace(ENGINE, draining=True)
    async with _readiness(postgres_url, engine_healthy=True, engine=drained) as readiness:
        assert await readiness.problems() == ["every engine is drained: `clawloop engine drain --undo e0`"]


# Whose word the gateway takes for the client's address and scheme.


async def seen(settings: Settings, peer: str, forwarded: str) -> tuple[str, str]:
    """The client and scheme that the application sees of a request from `peer`."""
    found: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scope)

    config = server_config(app, settings)
    config.load()
    headers = [(b"x-forwarded-for", forwarded.encode()), (b"x-forwarded-proto", b"https")]
    scope: Any = {"type": "http", "scheme": "http", "client": (peer, 5), "headers": headers}
    await config.loaded_app(scope, None, None)
    return found["client"][0], found["scheme"]


async def test_only_a_proxy_of_this_machine_is_believed_unless_others_are_named() -> None:
    default = Settings()
    assert await seen(default, "127.0.0.1", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(default, "::1", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(default, "10.0.0.7", "203.0.113.5") == ("10.0.0.7", "http")


async def test_named_proxies_are_believed_and_their_clients_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TRUSTED_PROXIES", "10.0.0.0/24, 192.0.2.9")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own, which Clawloop does not read
    settings = read_settings()
    assert await seen(settings, "10.0.0.7", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(settings, "10.0.0.7", "1.2.3.4, 203.0.113.5, 192.0.2.9") == ("203.0.113.5", "https")
    assert await seen(settings, "127.0.0.1", "203.0.113.5") == ("127.0.0.1", "http")


@pytest.mark.parametrize("given", ["*", "proxy.example.org", "10.0.0.1/8", "10.0.0.1,nonsense"])
def test_what_is_no_address_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TRUSTED_PROXIES", given)
    with pytest.raises(SetupError, match="CLAWLOOP_TRUSTED_PROXIES"):
        read_settings()


# A gateway's inherited socket: which descriptors it takes, and what it says of others.


def test_a_stream_socket_is_taken_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        with inherited_socket(os.dup(held.fileno()), "--fd") as inherited:
            assert inherited.getsockname() == held.getsockname()


def test_a_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        with pytest.raises(SetupError, match=rf"--fd: file descriptor {file.fileno()} is not a socket"):
            inherited_socket(file.fileno(), "--fd")


def test_a_datagram_socket_is_refused() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(SetupError, match="not a TCP or Unix stream socket"):
            inherited_socket(datagrams.fileno(), "--fd")


def test_systemds_variables_count_only_for_this_process() -> None:
    assert systemd_socket({}) is None
    assert systemd_socket({"LISTEN_FDS": "1", "LISTEN_PID": "1"}) is None
    with pytest.raises(SetupError, match="LISTEN_FDS=2: a gateway takes one socket"):
        systemd_socket({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())})
