"""`POST /v1/responses` on top of what is recorded, and fields whose form it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Gateway
from tests.api.test_responses import PATH, TOOL


async def test_new_instructions_replace_instructions_and_nothing_else(gateway: Gateway) -> None:
    developer: Any = [{"role": "developer", "content": "The user is a nurse."}, {"role": "user", "content": "hello"}]
    async with gateway.openai() as client:
        first = await client.responses.create(model="policy", instructions="Be brief.", input=developer)
        kept = await client.responses.create(model="policy", previous_response_id=first.id, input="and now?")
        for name in (first.id, kept.id):
            await client.responses.create(
                model="policy", previous_response_id=name, instructions="Be long.", input="go on"
            )
        again = await client.responses.create(model="policy", previous_response_id=kept.id, input="once more")
        await client.responses.create(model="policy", previous_response_id=again.id, instructions="Sing.", input="x")
        # Without instructions the developer's message is the whole system message.
        bare = await client.responses.create(model="policy", input=developer)
        await client.responses.create(model="policy", previous_response_id=bare.id, instructions="Sing.", input="x")
        chat = await client.chat.completions.create(
            model="policy", messages=[{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]
        )
        await client.responses.create(model="policy", previous_response_id=chat.id, instructions="Sing.", input="x")
    assert [asked["messages"][0]["content"] for asked in gateway.engine.requests] == [
        "Be brief.\n\nThe user is a nurse.",
        "Be brief.\n\nThe user is a nurse.",
        "Be long.\n\nThe user is a nurse.",
        "Be long.\n\nThe user is a nurse.",
        "Be brief.\n\nThe user is a nurse.",
        "Sing.\n\nThe user is a nurse.",
        "The user is a nurse.",
        "Sing.\n\nThe user is a nurse.",
        "Mine.",
        "Sing.\n\nMine.",
    ]
    assert all("instructions_length" not in asked for asked in gateway.engine.requests)


async def test_a_conversation_whose_system_message_has_no_content_goes_on(gateway: Gateway) -> None:
    async with gateway.client() as client:
        bare = {"model": "policy", "messages": [{"role": "system"}, {"role": "user", "content": "x"}]}
        first = (await client.post("/v1/chat/completions", json=bare)).json()["id"]
        for more in ({}, {"instructions": "Be brief."}):
            given = {"model": "policy", "previous_response_id": first, "input": "go on"} | more
            assert (await client.post(PATH, json=given)).status_code == 200
    assert [message["role"] for message in gateway.engine.requests[2]["messages"]][:2] == ["system", "system"]


async def test_a_reply_of_an_impossible_time_is_unknown(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for name in ("resp_ffffffffffff7fffbfffffffffffffff", "resp_00000000000070008000000000000000"):
            answer = await client.get(f"{PATH}/{name}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
@pytest.mark.parametrize("name", [[], {}, None, 5])
async def test_allowed_tools_without_a_name_are_refused(gateway: Gateway, path: str, name: Any) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]}
    async with gateway.client() as client:
        answer = await client.post(path, json={"model": "policy", "input": "x", "tools": [TOOL], "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice.tools.0.name")


@pytest.mark.parametrize("kwargs", ["x", [1], 5, True])
async def test_template_settings_that_are_no_object_are_refused(gateway: Gateway, kwargs: Any) -> None:
    given = {"model": "policy", "chat_template_kwargs": kwargs}
    async with gateway.client() as client:
        for answer in (
            await client.post(f"{PATH}/input_tokens", json=given | {"input": "x", "reasoning": {"effort": "low"}}),
            await client.post(f"{PATH}/input_tokens", json=given | {"input": "x"}),
        ):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


async def test_echo_is_refused(gateway: Gateway) -> None:
    """With it the engine gives the prompt's log-probs too, which would be taken for the reply's."""
    async with gateway.client() as client:
        for path, given in (
            ("/v1/completions", {"prompt": "Once"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            (PATH, {"input": "x"}),
        ):
            answer = await client.post(path, json={"model": "policy", "echo": True} | given)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "echo", "unsupported_parameter"), path
    assert gateway.engine.requests == []
