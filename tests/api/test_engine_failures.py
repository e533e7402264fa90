"""Engines that refuse, break, send bad data or are away: what the client gets, and what is recorded."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.turns import TurnStatus
from tests.api.chat_requests import IDS, PATH, TEXT, chat_body, events
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine, fake_engine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_keeps_status_and_message_and_gets_openais_code(
    gateway: Gateway, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("OVERFLOW", stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096" in error["message"]
    assert not gateway.turns.records


async def test_an_engines_failure_is_502_with_its_reason_and_recorded(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("FAIL500"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_broke")
    assert "EngineCore" in answer.json()["error"]["message"]
    [turn] = await gateway.recorded()
    assert (turn.status, turn.response, turn.response_ids) == (TurnStatus.ERROR, None, None)


async def test_an_answer_that_is_not_json_is_502_in_openais_shape(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for word in ("GARBAGE", "HTML"):
            answer = await client.post(PATH, json=chat_body(word))
            assert answer.status_code == 502
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.post(PATH, json=chat_body())).status_code == 200


@pytest.mark.parametrize("word", ["BREAK", "RESETMID", "GARBAGE", "ERROREVENT"])
async def test_a_broken_stream_ends_in_an_error_event_and_its_tokens_are_recorded(gateway: Gateway, word: str) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(word, stream=True))
        *chunks, last = events(answer.text)
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in answer.text
        assert (await client.post(PATH, json=chat_body(stream=True))).text.endswith("data: [DONE]\n\n")
    broken, _ = await gateway.recorded(2)
    assert broken.status is TurnStatus.ERROR
    assert broken.error
    assert broken.response_ids == IDS[:2]
    assert broken.response == {"role": "assistant", "content": "Hello there"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello there"


@pytest.mark.parametrize(("word", "reason"), [("UNEVEN", "log-probs"), ("NOIDS", "token ids")])
@pytest.mark.parametrize("stream", [False, True])
async def test_inconsistent_tokens_are_discarded_and_the_chat_goes_on(
    gateway: Gateway, word: str, reason: str, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(word, stream=stream))
    assert answer.status_code == 200
    [turn] = await gateway.recorded()
    assert (turn.response_ids, turn.logprobs) == (None, None)
    assert turn.error is not None
    assert reason in turn.error
    assert turn.response == {"role": "assistant", "content": TEXT}


@pytest.mark.parametrize("probed", [False, True])
async def test_a_request_waits_while_the_only_engine_restarts(tmp_path: Path, probed: bool) -> None:
    async with AsyncExitStack() as first_engine:
        first = await first_engine.enter_async_context(fake_engine())
        port = int(first.url.rsplit(":", 1)[1])
        async with running_gateway(tmp_path, engines=[first]) as gateway, gateway.client() as client:
            await until(gateway.services.engines.healthy)
            await first_engine.aclose()
            if probed:
                await until(lambda: not gateway.services.engines.healthy())
            request = asyncio.create_task(client.post(PATH, json=chat_body(stream=True)))
            await until(lambda: _waiting(gateway) == 1)
            async with fake_engine(port) as second:
                answer = await request
            assert events(answer.text)[-1] == "[DONE]"
            assert _waiting(gateway) == 0
            assert (len(first.requests), len(second.requests)) == (0, 1)
            [turn] = await gateway.recorded()
            assert (turn.status, turn.response_ids) == (TurnStatus.COMPLETE, IDS)


def _waiting(gateway: Gateway) -> float | None:
    """How many requests wait for an engine."""
    return gateway.services.metrics.registry.get_sample_value("clawloop_gateway_requests_held")


async def test_requests_to_a_dead_engine_go_to_another(tmp_path: Path, engine: FakeEngine) -> None:
    async with fake_engine() as dying, running_gateway(tmp_path, engines=[dying, engine]) as gateway:
        async with gateway.client() as client:
            await until(lambda: len(gateway.services.engines.healthy()) == 2)
            gateway.directory.set_engines(
                [Engine("e0", "http://127.0.0.1:9", {}, False), Engine("e1", engine.url, {}, False)]
            )
            await until(lambda: gateway.services.directory.snapshot.engines[0].url.endswith(":9"))
            answers = await asyncio.gather(*(client.post(PATH, json=chat_body(f"q{n}")) for n in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_without_an_engine_few_requests_wait_and_others_get_503_at_once(
    tmp_path: Path, engine: FakeEngine
) -> None:
    engine.healthy = False
    async with running_gateway(tmp_path, engines=[engine], hold_seconds=60) as gateway, gateway.client() as client:
        held = [asyncio.create_task(client.post(PATH, json=chat_body())) for _ in range(2)]
        await until(lambda: _waiting(gateway) == 2)
        refused = [await client.post(PATH, json=chat_body()) for _ in range(3)]
        engine.healthy = True
        assert [(await answer).status_code for answer in held] == [200, 200]
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all(answer.headers["Retry-After"] for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"engine_unavailable"}
    assert all("wait for one already" in answer.json()["error"]["message"] for answer in refused)


async def test_a_request_that_waited_for_an_engine_in_vain_gets_503(tmp_path: Path, engine: FakeEngine) -> None:
    engine.healthy = False
    async with running_gateway(tmp_path, engines=[engine], hold_seconds=0.1) as gateway, gateway.client() as client:
        answer = await client.post(PATH, json=chat_body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["Retry-After"]


async def test_a_session_stays_on_its_engine_and_sessions_spread(tmp_path: Path) -> None:
    async with fake_engine() as one, fake_engine() as two:
        async with running_gateway(tmp_path, engines=[one, two]) as gateway, gateway.client() as client:
            await until(lambda: len(gateway.services.engines.healthy()) == 2)
            for session in range(12):
                for _ in range(3):
                    await client.post(PATH, json=chat_body(), headers={"X-Session-Id": f"s{session}"})
            turns = await gateway.recorded(36)
    homes: dict[Any, set[Any]] = {}
    for turn in turns:
        homes.setdefault(turn.evidence.value, set()).add(turn.engine_id)
    assert all(len(engines) == 1 for engines in homes.values())
    assert len(set().union(*homes.values())) == 2


async def test_a_missing_version_is_answered_by_the_active_one(tmp_path: Path, engine: FakeEngine) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({1, 2})) as gateway,
        gateway.client() as client,
    ):
        first = await client.post(PATH, json=chat_body("TOOL"))
        call = first.json()["choices"][0]["message"]
        gateway.directory.set_active(3, versions=frozenset({2, 3}))
        await until(lambda: gateway.services.directory.policy("default").active == 3)
        history = [*chat_body()["messages"][:0], {"role": "user", "content": "TOOL"}, call]
        history.append({"role": "tool", "tool_call_id": "t1", "content": "ok"})
        await client.post(PATH, json=chat_body(messages=history))
        engine.models = {"default-v3"}
        await client.post(PATH, json=chat_body(messages=history))
        await client.post(PATH, json=chat_body())
        pinned = await client.post(PATH, json=chat_body() | {"model": "default-v2"})
    turns = await gateway.recorded(4)
    assert [turn.version for turn in turns] == [2, 2, 3, 3]
    assert pinned.status_code == 404


async def test_a_silent_engine_does_not_delay_the_probes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far longer than `until` waits: a probe behind the silent engine's would never be seen.
    monkeypatch.setattr("clawloop.serving.chat.PROBE_TIMEOUT", aiohttp.ClientTimeout(total=600))

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def until_healthy(engines: set[str]) -> None:
        await until(lambda: gateway.services.engines.healthy() == engines)

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, fake_engine() as engine:
        engines = [engine, FakeEngine(url=f"http://127.0.0.1:{port}")]
        async with running_gateway(tmp_path, engines=engines) as gateway:
            for _ in range(2):
                await until_healthy({"e0"})
                engine.healthy = False
                await until_healthy(set())
                engine.healthy = True


async def test_a_request_waits_for_an_engine_that_lacks_the_active_version(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawloop.serving.rotation.MISSING_SECONDS", 0.3)
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({2}), hold_seconds=20) as gateway,
        gateway.client() as client,
    ):
        assert (await client.post(PATH, json=chat_body())).status_code == 200
        engine.models = set()  # restarted, and its agent has not reported yet
        request = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: len(engine.requests) == 2)
        engine.models = {"default-v2"}  # loaded again
        assert (await request).status_code == 200
        engine.models = set()
        missing = await client.post(PATH, json=chat_body())
    assert missing.status_code == 503
    assert missing.headers["Retry-After"]
    assert missing.json()["error"]["code"] == "engine_unavailable"
