"""Anthropic's Messages, with Anthropic's own SDK and types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import anthropic
import httpx
import orjson
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import ErrorResponse, Message, MessageParam, ToolParam
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from api.wire.messages import MessagesRequest, translate_messages
from clawloop.core.contracts.turns import SessionSource, TurnKind, TurnStatus
from clawloop.core.errors import RequestRejected
from clawloop.core.ids import responses_id, turn_id_of
from tests.api.chat_requests import IDS, TEXT
from tests.api.conftest import Gateway
from tests.fakes.engine import PROMPT_IDS

PATH = "/v1/messages"
TOOL: ToolParam = {
    "name": "exec",
    "description": "run a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
VERSION = {"anthropic-version": "2023-06-01"}
SESSION = "0b6c1d2e-1111-4222-8333-444455556666"


def body(*content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": entry} if isinstance(entry, str) else entry for entry in content]
    return {"model": "policy", "max_tokens": 100, "messages": messages or [user("hello")], **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@asynccontextmanager
async def sdk(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0, timeout=120) as client:
        yield client


async def post(gateway: Gateway, given: Any, path: str = PATH, **headers: str) -> httpx.Response:
    async with gateway.client() as client:
        return await client.post(path, json=given, headers=VERSION | headers)


async def test_a_message_is_answered_and_recorded(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        message = await client.messages.create(
            model="policy", max_tokens=100, system="Be brief.", messages=[{"role": "user", "content": "hello"}]
        )
    Message.model_validate(message.to_dict())
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": TEXT}]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 6)
    (turn,) = await gateway.recorded()
    assert turn.turn_id == turn_id_of(message.id)
    assert turn.messages == [{"role": "system", "content": "Be brief."}, user("hello")]
    assert (turn.prompt_ids, turn.response_ids, turn.kind) == (PROMPT_IDS, IDS, TurnKind.MAIN)
    assert turn.logprobs == [-token / 100 for token in IDS]
    assert gateway.engine.requests[0]["max_tokens"] == 100


async def test_a_stream_is_the_published_one(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        async with client.messages.stream(
            model="policy", max_tokens=100, messages=[{"role": "user", "content": "hello"}]
        ) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            message = await stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") == 5
    Message.model_validate(message.to_dict())
    assert message.content[0].to_dict()["text"] == TEXT
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 6)
    (turn,) = await gateway.recorded()
    assert (turn.response_ids, turn.status) == (IDS, TurnStatus.COMPLETE)


async def test_each_token_arrives_as_the_engine_makes_it(gateway: Gateway) -> None:
    gateway.engine.halt = 3
    arrived = []
    async with gateway.client() as client:
        async with client.stream("POST", PATH, json=body(stream=True), headers=VERSION) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:") and "text_delta" in line:
                    arrived.append(line)
                    if len(arrived) == 2:
                        gateway.engine.go_on.set()  # the engine had made no more until then
    assert len(arrived) == 5


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_tool_call_and_its_result_are_one_session(gateway: Gateway, streamed: bool) -> None:
    call: Message
    question: MessageParam = {"role": "user", "content": "use a TOOL"}
    async with sdk(gateway) as client:
        if streamed:
            async with client.messages.stream(
                model="policy", max_tokens=100, messages=[question], tools=[TOOL]
            ) as stream:
                call = await stream.get_final_message()
        else:
            call = await client.messages.create(model="policy", max_tokens=100, messages=[question], tools=[TOOL])
        assert call.stop_reason == "tool_use"
        (block,) = call.content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("exec", {"command": "ls"})
        result: MessageParam = {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "a.txt"}]},
                {"type": "text", "text": "and now?"},
            ],
        }
        replayed: Any = {"role": "assistant", "content": [block.to_dict()]}
        await client.messages.create(
            model="policy", max_tokens=100, messages=[question, replayed, result], tools=[TOOL]
        )
    first, second = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(2)]
    assert first is not None
    assert second is not None
    assert second.session_id == first.session_id
    assert second.parent_turn_id == first.record.turn_id
    assert [message["role"] for message in second.record.messages] == ["user", "assistant", "tool", "user"]
    assert second.record.messages[2]["content"] == "a.txt"


async def test_thinking_is_a_block_and_is_read_back(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        async with client.messages.stream(
            model="policy",
            max_tokens=100,
            messages=[{"role": "user", "content": "THINK"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert gateway.engine.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
    replayed = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
    answer = await post(gateway, body("THINK", replayed, "thanks"))
    assert answer.status_code == 200
    assert gateway.engine.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Let me see.",
    }
    first, second = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(2)]
    assert first is not None
    assert second is not None
    assert second.parent_turn_id == first.record.turn_id


async def test_tokens_are_counted_by_the_engine(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        counted = await client.messages.count_tokens(
            model="policy", system="be brief", messages=[{"role": "user", "content": "one two three"}], tools=[TOOL]
        )
    assert counted.input_tokens == 5
    (asked,) = gateway.engine.requests
    assert asked["model"] == "tiny"
    assert asked["tools"][0]["function"]["name"] == "exec"
    assert gateway.turns.records == []


@pytest.mark.parametrize(
    "user_id",
    [f"user_abc_account__session_{SESSION}", orjson.dumps({"device_id": "abc", "session_id": SESSION}).decode()],
)
async def test_claude_codes_user_id_names_the_session(gateway: Gateway, user_id: str) -> None:
    assert (await post(gateway, body(metadata={"user_id": user_id}))).status_code == 200
    (turn,) = await gateway.recorded()
    assert (turn.evidence.source, turn.evidence.value) == (SessionSource.METADATA, SESSION)


async def test_claude_codes_billing_line_is_left_out(gateway: Gateway) -> None:
    for number in (1, 2):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}]
        system.append({"type": "text", "text": "You code."})
        assert (await post(gateway, body(system=system))).status_code == 200
    assert [request["messages"][0] for request in gateway.engine.requests] == [
        {"role": "system", "content": "You code."}
    ] * 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"model": "policy", "messages": [user("x")]}, "max_tokens"),
        (body(max_tokens=0), "max_tokens"),
        (body({"role": "robot", "content": "x"}), "messages.0.role"),
        (body(user([{"type": "hologram"}])), "messages.0.content.0.type"),
        (body(user([{"type": "text", "text": 7}])), "messages.0.content.0.text"),
        (body(user([])), "messages.0.content"),
        (body(user(7)), "messages.0.content"),
        (body(user([7])), "messages.0.content.0"),
        (body(user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])), "messages.0.content.0.source"),
        (body(user([{"type": "document", "source": {"type": "base64"}}])), "messages.0.content.0.source"),
        (body(user([{"type": "tool_result", "tool_use_id": "t9"}])), "messages.0.content.0.tool_use_id"),
        (body({"role": "assistant", "content": [{"type": "server_tool_use"}]}), "messages.0.content.0.type"),
        (body(tools=[{"name": "x", "input_schema": 7}]), "tools.0.input_schema"),
        (body(tool_choice={"type": "tool", "name": "x"}), "tool_choice.name"),
        (body(tool_choice={"type": "magic"}), "tool_choice.type"),
        (body(tool_choice={"type": "any"}), "tool_choice"),
        (body(thinking={"type": "deep"}), "thinking.type"),
        (body(output_config={"format": {"type": "xml"}}), "output_config.format"),
        (body(metadata={"user_id": 7}), "metadata.user_id"),
        (body(stop_sequences=[f"x{n}" for n in range(65)]), "stop_sequences"),
        (body(priority=1), "priority"),
        (body(model="gpt-9"), "model"),
    ],
)
async def test_a_wrong_request_is_refused_in_anthropics_form(gateway: Gateway, given: Any, field: str) -> None:
    answer = await post(gateway, given)
    assert answer.status_code == (404 if field == "model" else 400)
    ErrorResponse.model_validate(answer.json())
    if field != "model":
        assert f"`{field}`" in answer.json()["error"]["message"]
    assert gateway.turns.records == []


@pytest.mark.parametrize("version", ["2020-01-01", "latest", ""])
async def test_an_unknown_api_version_is_refused(gateway: Gateway, version: str) -> None:
    answer = await post(gateway, body(), **{"anthropic-version": version})
    assert answer.status_code == 400
    assert "anthropic-version" in answer.json()["error"]["message"]
    async with gateway.client() as client:
        assert (await client.post(PATH, json=body())).status_code == 400


async def test_a_wrong_key_is_an_authentication_error(gateway: Gateway) -> None:
    async with AsyncAnthropic(base_url=gateway.url, api_key="cl-wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as raised:
            await client.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "x"}])
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": raised.value.body["error"]["message"]},  # type: ignore[index]
    }


async def test_what_is_not_used_is_dropped_and_named(gateway: Gateway) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    answer = await post(
        gateway,
        body(
            service_tier="auto",
            thinking={"type": "enabled", "budget_tokens": 2000},
            tools=[search, TOOL],
            invented=1,
        ),
    )
    assert answer.status_code == 200
    ignored = answer.headers["x-clawloop-ignored"].split(", ")
    assert ignored == ["invented", "service_tier", "thinking.budget_tokens", "tools.0.web_search_20250305"]
    assert len(gateway.engine.requests[0]["tools"]) == 1


def test_every_published_field_is_used_or_named() -> None:
    values: dict[str, Any] = dict.fromkeys(get_type_hints(MessageCreateParamsNonStreaming), "x")
    values |= body(stream=False, tools=[TOOL], tool_choice={"type": "auto"}, stop_sequences=["x"])
    values |= {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "metadata": {}, "system": "s"}
    translated = translate_messages(values, (), MessagesRequest)
    read = set(MessagesRequest.model_fields)
    assert set(translated.ignored) == set(values) - read


async def test_an_engine_that_breaks_ends_the_stream_with_an_error_event(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with client.messages.stream(
                model="policy", max_tokens=9, messages=[{"role": "user", "content": "BREAK"}]
            ) as stream:
                await stream.get_final_message()
    (turn,) = await gateway.recorded()
    assert turn.status is TurnStatus.ERROR


async def test_a_stream_cut_by_the_client_within_a_tool_call_is_recorded(gateway: Gateway) -> None:
    gateway.engine.halt = 4
    async with gateway.client() as client:
        given = body("use a TOOL", tools=[TOOL], stream=True)
        async with client.stream("POST", PATH, json=given, headers=VERSION) as answer:
            async for line in answer.aiter_lines():
                if "input_json_delta" in line:
                    break
    (turn,) = await gateway.recorded()
    assert turn.status is TurnStatus.ABORTED
    assert turn.response is not None
    calls: Any = turn.response["tool_calls"]
    assert calls[0]["function"]["arguments"].startswith('{"command"')


async def test_a_begun_reply_is_continued(gateway: Gateway) -> None:
    await post(gateway, body("Name a colour.", {"role": "assistant", "content": "The colour is"}))
    (asked,) = gateway.engine.requests
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)


async def test_models_are_listed_in_anthropics_form(gateway: Gateway) -> None:
    async with sdk(gateway) as client:
        names = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("qwen3-4b")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("claude-9")
    assert names == ["policy", "qwen3-4b", "policy-side", "qwen3-4b-side"]
    assert (one.id, one.type) == ("qwen3-4b", "model")


async def test_what_is_not_supported_is_refused_by_name(gateway: Gateway) -> None:
    answer = await post(gateway, {}, f"{PATH}/batches")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert answer.json()["error"]["message"].startswith("Batches: not supported")


async def test_a_conversation_may_change_its_wire_format(gateway: Gateway) -> None:
    first = await post(gateway, body("hello"))
    said = {"role": "assistant", "content": first.json()["content"][0]["text"]}
    messages = [user("hello"), said, user("and now?")]
    async with gateway.client() as client:
        chat = await client.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
        messages += [{"role": "assistant", "content": chat.json()["choices"][0]["message"]["content"]}, user("go on")]
        await client.post("/v1/responses", json={"model": "policy", "input": messages})
    turns = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(3)]
    one, two, three = (turn for turn in turns if turn is not None)
    assert one.session_id == two.session_id == three.session_id
    assert (two.parent_turn_id, three.parent_turn_id) == (one.record.turn_id, two.record.turn_id)


async def test_a_reply_that_the_client_began_is_one_message_of_the_conversation(gateway: Gateway) -> None:
    await post(gateway, body("Name a colour.", {"role": "assistant", "content": "The colour is: "}))
    said = {"role": "assistant", "content": f"The colour is: {TEXT}"}
    await post(gateway, body("Name a colour.", said, "And another."))
    first, second = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(2)]
    assert first is not None
    assert second is not None
    assert second.session_id == first.session_id
    assert second.parent_turn_id == first.record.turn_id
    assert first.record.response == {"role": "assistant", "content": TEXT}  # as the engine's tokens are
    async with gateway.client() as client:
        given = {"model": "policy", "previous_response_id": responses_id(first.record.turn_id), "input": "go on"}
        assert (await client.post("/v1/responses", json=given)).status_code == 200
    assert gateway.engine.requests[2]["messages"] == [user("Name a colour."), said, user("go on")]


async def test_a_reply_does_not_go_on_after_a_tool_call(gateway: Gateway) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "exec", "input": {}}
    given = body("Name a colour.", {"role": "assistant", "content": [{"type": "text", "text": "Well."}, call]})
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = await post(gateway, given, path)
        assert answer.status_code == 400
        assert "`messages.1`" in answer.json()["error"]["message"]
        assert "tool_result" in answer.json()["error"]["message"]
    assert gateway.engine.requests == []


async def test_deeply_nested_metadata_is_refused(gateway: Gateway) -> None:
    nested = orjson.loads("[" * 300 + "]" * 300)
    name = json.dumps({"session_id": "s", "device": nested})
    answer = await post(gateway, body(metadata={"user_id": name}))
    assert answer.status_code == 400
    assert "`metadata.user_id`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kwargs", ["x", [1], 5])
async def test_template_settings_that_are_no_object_are_refused(gateway: Gateway, kwargs: Any) -> None:
    for more in ({}, {"output_config": {"effort": "low"}}):
        given = body(chat_template_kwargs=kwargs) | more
        answer = await post(gateway, given, f"{PATH}/count_tokens")
        assert answer.status_code == 400
        assert "`chat_template_kwargs`" in answer.json()["error"]["message"]


async def test_a_document_is_read_as_its_text(gateway: Gateway) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    named = {"title": "Rivers", "context": "From a school book."}
    documents = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The Rhine."}, **named},
        {"type": "document", "source": {"type": "content", "content": "The Elbe."}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "A map:"}, image]}},
    ]
    answer = await post(gateway, body(user([*documents, {"type": "text", "text": "Which is longer?"}])))
    assert answer.status_code == 200, answer.text
    [sent] = gateway.engine.requests[-1]["messages"]
    said = [part.get("text") for part in sent["content"]]
    assert said == ["Rivers\nFrom a school book.", "The Rhine.", "The Elbe.", "A map:", None, "Which is longer?"]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    refused = (await post(gateway, body(user([pdf])))).json()["error"]["message"]
    assert "no PDF" in refused
    assert "Send the text of the document" in refused
    nested = {"type": "document", "source": {"type": "content", "content": [documents[0]]}}
    assert (await post(gateway, body(user([nested])))).status_code == 400


async def test_a_base_url_with_v1_is_told_apart_from_an_unknown_address(gateway: Gateway) -> None:
    async with gateway.client() as client:
        missing = await client.post("/v1/v1/messages", json={}, headers={"anthropic-version": "2023-06-01"})
    assert missing.status_code == 404
    assert f"which is then {gateway.url}." in missing.json()["error"]["message"]


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
REPORT = {"type": "document", "title": "report.pdf", "source": PDF}


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (REPORT, "[document report.pdf: not readable here]"),
        (REPORT | {"title": None}, "[document: not readable here]"),
        (REPORT | {"context": "Of May."}, "[document report.pdf: not readable here]\nOf May."),
        (REPORT | {"source": {"type": "file", "file_id": "file_1"}}, "[document report.pdf: not readable here]"),
        (REPORT | {"source": {"type": "url", "url": "https://x/y.pdf"}}, "[document report.pdf: not readable here]"),
        (REPORT | {"title": "a\nb" + 300 * "c"}, f"[document a b{197 * 'c'}: not readable here]"),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "[image: not readable here]"),
    ],
)
def test_what_no_engine_reads_ends_no_session(block: dict[str, Any], line: str) -> None:
    """It is refused where it is said, and a line once the conversation has gone on."""
    said = user([block, {"type": "text", "text": "What does it say?"}])
    with pytest.raises(RequestRejected) as refused:
        translate_messages(body("hello", said), ())
    assert refused.value.field == "messages.1.content.0.source"
    translated = translate_messages(body(said, "Then only this: why?"), ())
    assert [part["text"] for part in translated.body["messages"][0]["content"]] == [line, "What does it say?"]
    assert translated.ignored == (f"messages.0.content.0.{block['type']}",)


def test_a_result_that_no_engine_reads_ends_no_session() -> None:
    read = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]}
    result = user([{"type": "tool_result", "tool_use_id": "t1", "content": [REPORT]}])
    with pytest.raises(RequestRejected):
        translate_messages(body("Read it.", read, result), ())
    translated = translate_messages(body("Read it.", read, result, "Never mind."), ())
    assert translated.body["messages"][2]["content"] == "[document report.pdf: not readable here]"
    assert translated.ignored == ("messages.2.content.0.content.0.document",)
