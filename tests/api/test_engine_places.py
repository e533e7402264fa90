"""Chats leave a part of each engine free: what is beyond waits for its turn, or is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import ClawloopError, JudgeRefused, JudgeUnavailable
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.judge import fake_judge


async def test_chats_of_all_keys_leave_places_and_a_second_key_comes_next(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], places=3) as gateway:
        engine.hold = asyncio.Event()
        async with gateway.client() as busy, gateway.client(gateway.keys.add("default", {Scope.CHAT})) as other:
            many = [asyncio.create_task(busy.post(PATH, json=chat_body(f"busy {n}"))) for n in range(8)]
            await until(lambda: len(engine.requests) == 3)
            one = asyncio.create_task(other.post(PATH, json=chat_body("other")))
            held = gateway.services.metrics.registry
            await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 6)
            assert len(engine.requests) == 3
            engine.hold.set()
            assert {answer.status_code for answer in await asyncio.gather(*many, one)} == {200}
        sent = [request["messages"][0]["content"] for request in engine.requests]
        assert sent.index("other") == 3  # before five that came earlier
        assert len(await gateway.recorded(9)) == 9


async def test_a_request_counts_by_its_choices(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], places=3) as gateway, gateway.client() as client:
        engine.hold = asyncio.Event()
        two = asyncio.create_task(client.post(PATH, json=chat_body(n=2)))
        await until(lambda: len(engine.requests) == 1)
        further = asyncio.create_task(client.post(PATH, json=chat_body(n=2)))
        held = gateway.services.metrics.registry
        await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 1)
        two.cancel()  # a client that leaves gives its places back
        await until(lambda: len(engine.requests) == 2)
        engine.hold.set()
        assert (await further).status_code == 200


async def test_a_request_that_waited_is_sent_with_the_secret_of_now(tmp_path: Path, engine: FakeEngine) -> None:
    secrets = ["old"]
    async with (
        running_gateway(tmp_path, engines=[engine], places=1, secret=lambda: secrets[-1]) as gateway,
        gateway.client() as client,
    ):
        engine.hold = asyncio.Event()
        asked = [asyncio.create_task(client.post(PATH, json=chat_body())) for _ in range(2)]
        held = gateway.services.metrics.registry
        await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 1)
        secrets.append("new")
        engine.hold.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert engine.authorizations == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_gets_no_place_is_refused_by_name_and_leaves_no_turn(
    stream: bool, tmp_path: Path, engine: FakeEngine
) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], places=1, place_seconds=0.05) as gateway,
        gateway.client() as client,
    ):
        engine.hold = asyncio.Event()
        first = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: len(engine.requests) == 1)
        refused = await client.post(PATH, json=chat_body(stream=stream))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "engines_busy", "rate_limit_error")
        assert "`CLAWLOOP_ENGINE_CHATS`" in error["message"]
        assert int(refused.headers["Retry-After"]) > 0
        engine.hold.set()
        assert (await first).status_code == 200
        assert (await client.post(PATH, json=chat_body())).status_code == 200
        assert len(await gateway.recorded(2)) == 2


async def test_grammars_of_all_keys_together_leave_some_of_the_engine(tmp_path: Path, engine: FakeEngine) -> None:
    structured = chat_body(structured_outputs={"choice": ["a"]})
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        bound = gateway.services.limits.chat.structured_requests_together
        engine.hold = asyncio.Event()
        clients = [gateway.client(gateway.keys.add("default", {Scope.CHAT})) for _ in range(bound + 1)]
        asked = [asyncio.create_task(client.post(PATH, json=structured)) for client in clients]
        await until(lambda: len(engine.requests) == bound)
        refused, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in refused] == [429]
        assert len(engine.requests) == len(waiting) == bound
        engine.hold.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize("with_chats", [True, False])
async def test_judges_precede_chats_on_our_engines_and_other_servers_get_no_field_of_vllm(
    with_chats: bool, engine: FakeEngine
) -> None:
    def here(_: str) -> list[Endpoint]:
        return [Endpoint(engine.url, "tiny")]

    prompt = JudgePrompt([{"role": "user", "content": "hello"}], "mark", AnswerForm.FREE, None)
    async with JudgeClient(here, AnswerForm.FREE, with_chats=with_chats) as judge:
        await judge.answers("default", prompt, 1, 0.6)
    assert engine.requests[-1].get("priority", 0) == (-1 if with_chats else 0)


@pytest.mark.parametrize(("with_chats", "error"), [(True, JudgeUnavailable), (False, JudgeRefused)])
async def test_engines_of_ours_that_refuse_the_secret_are_asked_again_by_judges(
    with_chats: bool, error: type[ClawloopError]
) -> None:
    """While the secret is renewed another engine may have it, or this one in a moment."""
    prompt = JudgePrompt([{"role": "user", "content": "hello"}], "mark", AnswerForm.FREE, None)
    async with fake_judge() as engine:
        engine.mode = "401"
        endpoint = Endpoint(engine.url, "tiny")
        async with JudgeClient(lambda _: [endpoint], AnswerForm.FREE, with_chats=with_chats) as judge:
            with pytest.raises(error):
                await judge.answers("default", prompt, 1, 0.6)
