"""Chat with an episode's key: what is sent, recorded and refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.turns import TurnKind
from tests.api.chat_requests import chat, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.notifier import FakeNotifier

CHAT = "/v1/chat/completions"


def episode_key(gateway: Gateway) -> tuple[object, str]:
    key, secret = gateway.keys.add_episode("default", datetime.now(UTC) + timedelta(hours=1))
    return key.episode, secret


async def test_the_clients_sampling_is_replaced_and_recorded(gateway: Gateway) -> None:
    episode, secret = episode_key(gateway)
    asked: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "top_k": 5, "presence_penalty": 1.0, "min_p": 0.1}
    asked |= {"parallel_tool_calls": False, "seed": 7}
    async with gateway.client(secret) as client:
        answer = await client.post(CHAT, json=chat_body(**asked))
    assert answer.status_code == 200
    (record,) = await gateway.recorded()
    assert record.episode_id == episode
    assert record.sampling["asked"] == asked
    sent = {name: record.sampling.get(name) for name in asked}
    assert sent == {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | dict.fromkeys(
        ("presence_penalty", "min_p", "parallel_tool_calls", "seed")
    )
    request = gateway.engine.requests[-1]
    assert {"asked", "seed"}.isdisjoint(request)
    assert (request["temperature"], request["top_p"], request["top_k"]) == (1.0, 1.0, -1)


async def test_a_client_that_asks_for_nothing_has_nothing_recorded(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
    (record,) = await gateway.recorded()
    assert "asked" not in record.sampling
    assert record.sampling["temperature"] == 1.0  # not the policy's own for chats


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a+"}, "guided decoding"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"n": 2}, "`n`"),
    ],
)
async def test_what_could_not_be_trained_is_refused(gateway: Gateway, fields: dict[str, Any], named: str) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        answer = await client.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert gateway.turns.records == []


async def test_a_task_that_reads_like_a_side_prompt_is_a_main_turn(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    title = "### Task:\nGenerate a concise, 3-5 word title\n<chat_history></chat_history>"
    messages = [{"role": "user", "content": title}]
    async with gateway.client(secret) as client:
        assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    async with gateway.client() as client:
        assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    kinds = [record.kind for record in await gateway.recorded(2)]
    assert kinds == [TurnKind.MAIN, TurnKind.SIDE]


async def test_an_episode_gives_no_feedback(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        answer = await client.post("/v1/feedback", json={"response_id": "chatcmpl-0", "rating": "up"})
    assert answer.status_code == 403
    assert "verifier alone" in answer.json()["error"]["message"]


async def test_an_episodes_turns_follow_the_active_version_within_a_chain_of_tool_calls(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """A chat stays on its version there."""
    async with running_gateway(tmp_path, engines=[engine], active=1, versions=frozenset({1})) as gateway:
        _, secret = episode_key(gateway)
        asked = chat_body("TOOL")["messages"]
        answers = {}
        for key in (gateway.key, secret):
            async with gateway.client(key) as client:
                answer = await client.post(CHAT, json=chat_body("TOOL"))
            answers[key] = answer.json()["choices"][0]["message"]
        gateway.directory.set_active(2, versions=frozenset({1, 2}))
        await until(lambda: gateway.services.directory.policy("default").active == 2)
        for key, expected in ((gateway.key, 1), (secret, 2)):
            result = {"role": "tool", "tool_call_id": "t1", "content": "42"}
            async with gateway.client(key) as client:
                answer = await client.post(CHAT, json=chat_body(messages=[*asked, answers[key], result]))
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Clawloop-Version"] == str(expected)


async def test_equal_prompts_of_two_episodes_are_two_sessions(gateway: Gateway) -> None:
    for _ in range(2):
        _, secret = episode_key(gateway)
        async with gateway.client(secret) as client:
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
    first, second = await gateway.recorded(2)
    assert first.api_key_id != second.api_key_id
    assert first.messages == second.messages
    stored = [await gateway.turns.load(record.turn_id) for record in (first, second)]
    assert len({turn.session_id for turn in stored if turn is not None}) == 2


async def test_no_session_workflow_is_notified(engine: FakeEngine, tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with running_gateway(tmp_path, engines=[engine], notifier=notifier) as gateway:
        _, secret = episode_key(gateway)
        async with gateway.client(secret) as client:
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
        await chat(gateway)  # its notification comes after the episode's would have come
        await until(lambda: len(gateway.turns.announced) == 1)
    assert len(notifier.sent) == 1
