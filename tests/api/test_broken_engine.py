"""Engines that refuse, break, lie or are away: what the client hears, and what is recorded."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from clawloop.contracts.serving import Engine
from clawloop.contracts.turns import TurnStatus
from tests.api.conftest import Gateway, running_gateway
from tests.api.test_chat import IDS, TEXT, ask, events
from tests.fakes.engine import FakeEngine, fake_engine

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_keeps_status_and_message_and_gets_openais_code(
    gateway: Gateway, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=ask("OVERFLOW", stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096" in error["message"]
    assert not gateway.turns.records


async def test_an_engines_own_failure_is_passed_on_and_recorded(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=ask("FAIL500"))
    assert answer.status_code == 500
    assert "EngineCore" in answer.json()["error"]["message"]
    [turn] = await gateway.recorded()
    assert (turn.status, turn.response, turn.response_ids) == (TurnStatus.ERROR, None, None)


async def test_an_engine_that_answers_no_json_is_502_in_openais_shape(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for word in ("GARBAGE", "HTML"):
            answer = await client.post(PATH, json=ask(word))
            assert answer.status_code == 502
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.post(PATH, json=ask())).status_code == 200


@pytest.mark.parametrize("word", ["BREAK", "RESETMID", "GARBAGE", "ERROREVENT"])
async def test_a_stream_that_breaks_ends_in_an_error_event_and_keeps_what_was_made(gateway: Gateway, word: str) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=ask(word, stream=True))
        *chunks, last = events(answer.text)
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in answer.text
        assert (await client.post(PATH, json=ask(stream=True))).text.endswith("data: [DONE]\n\n")
    broken, _ = await gateway.recorded(2)
    assert broken.status is TurnStatus.ERROR
    assert broken.error
    assert broken.response_ids == IDS[:2]
    assert broken.response == {"role": "assistant", "content": "Hello there"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello there"


@pytest.mark.parametrize(("word", "says"), [("UNEVEN", "log-probs"), ("NOIDS", "token ids")])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_do_not_add_up_are_unknown_and_the_chat_goes_on(
    gateway: Gateway, word: str, says: str, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=ask(word, stream=stream))
    assert answer.status_code == 200
    [turn] = await gateway.recorded()
    assert (turn.response_ids, turn.logprobs) == (None, None)
    assert turn.error is not None
    assert says in turn.error
    assert turn.response == {"role": "assistant", "content": TEXT}


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_request_is_held_while_the_only_engine_restarts(tmp_path: Path, noticed: bool) -> None:
    async with AsyncExitStack() as first_life:
        first = await first_life.enter_async_context(fake_engine())
        port = int(first.url.rsplit(":", 1)[1])
        async with running_gateway(tmp_path, engines=[first]) as gateway, gateway.client() as client:
            await _until(gateway.services.engines.healthy)
            await first_life.aclose()
            if noticed:
                await _until(lambda: not gateway.services.engines.healthy())
            asking = asyncio.create_task(client.post(PATH, json=ask(stream=True)))
            await _until(lambda: _held(gateway) == 1)
            async with fake_engine(port) as second:
                answer = await asking
            assert events(answer.text)[-1] == "[DONE]"
            assert _held(gateway) == 0
            assert (len(first.requests), len(second.requests)) == (0, 1)
            [turn] = await gateway.recorded()
            assert (turn.status, turn.response_ids) == (TurnStatus.COMPLETE, IDS)


def _held(gateway: Gateway) -> float | None:
    """How many requests wait for an engine."""
    return gateway.services.metrics.registry.get_sample_value("clawloop_gateway_requests_held")


async def test_a_dead_engine_is_left_for_a_living_one(tmp_path: Path, engine: FakeEngine) -> None:
    async with fake_engine() as dying, running_gateway(tmp_path, engines=[dying, engine]) as gateway:
        async with gateway.client() as client:
            await _until(lambda: len(gateway.services.engines.healthy()) == 2)
            gateway.directory.set_engines(
                [Engine("e0", "http://127.0.0.1:9", {}, False), Engine("e1", engine.url, {}, False)]
            )
            await _until(lambda: gateway.services.directory.snapshot.engines[0].url.endswith(":9"))
            answers = await asyncio.gather(*(client.post(PATH, json=ask(f"q{n}")) for n in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_without_any_engine_a_request_is_held_up_to_a_bound_then_503(tmp_path: Path) -> None:
    async with fake_engine() as engine:
        engine.healthy = False
        async with (
            running_gateway(tmp_path, engines=[engine], hold_seconds=0.5) as gateway,
            gateway.client() as client,
        ):
            answers = await asyncio.gather(*(client.post(PATH, json=ask()) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [503] * 5
    assert all(answer.headers["Retry-After"] for answer in answers)
    assert {answer.json()["error"]["code"] for answer in answers} == {"engine_unavailable"}
    assert sum("wait for one already" in answer.json()["error"]["message"] for answer in answers) == 3


@pytest.mark.slow
async def test_a_session_stays_with_its_engine_and_others_spread(tmp_path: Path) -> None:
    async with fake_engine() as one, fake_engine() as two:
        async with running_gateway(tmp_path, engines=[one, two]) as gateway, gateway.client() as client:
            await _until(lambda: len(gateway.services.engines.healthy()) == 2)
            for session in range(12):
                for _ in range(3):
                    await client.post(PATH, json=ask(), headers={"X-Session-Id": f"s{session}"})
            turns = await gateway.recorded(36)
    homes: dict[Any, set[Any]] = {}
    for turn in turns:
        homes.setdefault(turn.evidence.value, set()).add(turn.engine_id)
    assert all(len(engines) == 1 for engines in homes.values())
    assert len(set().union(*homes.values())) == 2


async def test_a_version_the_engine_lost_is_answered_by_the_active_one(tmp_path: Path, engine: FakeEngine) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({1, 2})) as gateway,
        gateway.client() as client,
    ):
        first = await client.post(PATH, json=ask("TOOL"))
        call = first.json()["choices"][0]["message"]
        gateway.directory.set_active(3, versions=frozenset({2, 3}))
        await _until(lambda: gateway.services.directory.policy("default").active == 3)
        history = [*ask()["messages"][:0], {"role": "user", "content": "TOOL"}, call]
        history.append({"role": "tool", "tool_call_id": "t1", "content": "ok"})
        await client.post(PATH, json=ask(messages=history))
        engine.models = {"default-v3"}
        await client.post(PATH, json=ask(messages=history))
        await client.post(PATH, json=ask())
        pinned = await client.post(PATH, json=ask() | {"model": "default-v2"})
    turns = await gateway.recorded(4)
    assert [turn.version for turn in turns] == [2, 2, 3, 3]
    assert pinned.status_code == 404


async def _until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_silent_engine_keeps_nobody_from_asking_the_others(tmp_path: Path) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def until(healthy: frozenset[str]) -> None:
        async with asyncio.timeout(3):  # a probe that is not answered takes 5 s
            while gateway.services.engines.healthy() != healthy:
                await asyncio.sleep(0.01)

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, fake_engine() as engine:
        engines = [engine, FakeEngine(url=f"http://127.0.0.1:{port}")]
        async with running_gateway(tmp_path, engines=engines) as gateway:
            for _ in range(2):
                await until(frozenset({"e0"}))
                engine.healthy = False
                await until(frozenset())
                engine.healthy = True


async def test_an_engine_that_lost_the_active_version_is_waited_for(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawloop.serving.rotation.MISSING_SECONDS", 0.3)
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({2}), hold_seconds=20) as gateway,
        gateway.client() as client,
    ):
        assert (await client.post(PATH, json=ask())).status_code == 200
        engine.models = set()  # restarted, and its agent has not told yet
        asking = asyncio.create_task(client.post(PATH, json=ask()))
        await _until(lambda: len(engine.requests) == 2)
        engine.models = {"default-v2"}  # refilled
        assert (await asking).status_code == 200
        engine.models = set()
        lost = await client.post(PATH, json=ask())
    assert lost.status_code == 503
    assert lost.headers["Retry-After"]
    assert lost.json()["error"]["code"] == "engine_unavailable"
