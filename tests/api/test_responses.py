"""OpenAI's Responses and plain completions, with OpenAI's own SDK and types."""

from __future__ import annotations

import base64
from typing import Any, get_type_hints
from uuid import uuid4

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.responses import FunctionToolParam, Response, ResponseInputItemParam
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from api.wire.responses import ResponsesRequest, translate_responses
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import TurnKind, TurnStatus
from clawloop.core.errors import RequestRejected
from clawloop.core.ids import TurnId, new_turn_id, responses_id, turn_id_of
from tests.api.chat_requests import IDS, TEXT, events
from tests.api.conftest import Gateway
from tests.fakes.engine import PROMPT_IDS

# OpenAI's Responses and plain completions, with OpenAI's own SDK and types.

PATH = "/v1/responses"
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "exec",
    "description": "run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}


async def test_a_response_is_answered_and_recorded(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        response = await client.responses.create(
            model="policy", instructions="Be brief.", input="hello", max_output_tokens=50
        )
    Response.model_validate(response.to_dict())
    assert (response.output_text, response.status) == (TEXT, "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 6)
    (turn,) = await gateway.recorded()
    assert turn.turn_id == turn_id_of(response.id)
    assert turn.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (turn.prompt_ids, turn.response_ids, turn.kind) == (PROMPT_IDS, IDS, TurnKind.MAIN)
    assert gateway.engine.requests[0]["max_completion_tokens"] == 50


async def test_a_stream_is_the_published_one(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        async with client.responses.stream(model="policy", input="hello") as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
    kinds = [event.type for event in seen]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds.count("response.output_text.delta") == 5
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert final.output_text == TEXT
    Response.model_validate(final.to_dict() | {"output": [_without_parsed(item) for item in final.to_dict()["output"]]})  # type: ignore[attr-defined]
    (turn,) = await gateway.recorded()
    assert (turn.response_ids, turn.status) == (IDS, TurnStatus.COMPLETE)


def _without_parsed(item: Any) -> Any:
    content = [{name: part[name] for name in part if name != "parsed"} for part in item["content"]]
    return item | {"content": content}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_tool_call_and_its_result_are_one_session(gateway: Gateway, streamed: bool) -> None:
    call: Any
    async with gateway.openai() as client:
        if streamed:
            async with client.responses.stream(model="policy", input="use a TOOL", tools=[TOOL]) as stream:
                call = (await stream.get_final_response()).output[0]
        else:
            call = (await client.responses.create(model="policy", input="use a TOOL", tools=[TOOL])).output[0]
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("exec", '{"command": "ls"}', "completed")
        items: list[Any] = [
            {"role": "user", "content": "use a TOOL"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"},
        ]
        await client.responses.create(model="policy", input=items, tools=[TOOL])
    first, second = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(2)]
    assert first is not None
    assert second is not None
    assert second.session_id == first.session_id
    assert second.parent_turn_id == first.record.turn_id
    assert second.record.messages[2] == {"role": "tool", "tool_call_id": call.call_id, "content": "a.txt"}


async def test_thinking_is_an_item_and_is_read_back(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        async with client.responses.stream(model="policy", input="THINK") as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message"]
        replayed = [item.to_dict() for item in final.output]
        items: Any = [{"role": "user", "content": "THINK"}, *replayed, {"role": "user", "content": "thanks"}]
        await client.responses.create(model="policy", input=items)
    assert gateway.engine.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Let me see.",
    }
    first, second = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(2)]
    assert second is not None
    assert first is not None
    assert second.parent_turn_id == first.record.turn_id


async def test_a_conversation_goes_on_from_a_recorded_response(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(model="policy", instructions="Be brief.", input="hello")
        second = await client.responses.create(model="policy", previous_response_id=first.id, input="and now?")
        await client.responses.create(
            model="policy", previous_response_id=second.id, instructions="Be long.", input="go on"
        )
    said = [(message["role"], message["content"]) for message in gateway.engine.requests[2]["messages"]]
    assert said == [
        ("system", "Be long."),
        ("user", "hello"),
        ("assistant", TEXT),
        ("user", "and now?"),
        ("assistant", TEXT),
        ("user", "go on"),
    ]
    one, two, _ = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(3)]
    assert one is not None
    assert two is not None
    assert two.session_id == one.session_id
    assert two.parent_turn_id == one.record.turn_id


async def test_a_recorded_reply_is_given_back_to_its_key_until_it_is_erased(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        made = await client.responses.create(model="policy", input="use a TOOL", tools=[TOOL])
        again = await client.responses.retrieve(made.id)
        Response.model_validate(again.to_dict())
        assert [item.to_dict() for item in again.output] == [item.to_dict() for item in made.output]
        assert again.usage is not None
        assert (again.usage.input_tokens, again.usage.output_tokens) == (3, 5)  # those that are stored
        chat = await client.chat.completions.retrieve(f"chatcmpl-{made.id.removeprefix('resp_')}")
        assert chat.choices[0].message.tool_calls is not None
    stranger = gateway.keys.add("default", frozenset({Scope.CHAT}))
    turn = turn_id_of(made.id)
    assert turn is not None
    async with gateway.client(stranger) as other:
        assert (await other.get(f"{PATH}/{made.id}")).status_code == 404
        answer = await other.post(PATH, json={"model": "policy", "input": "x", "previous_response_id": made.id})
        assert answer.status_code == 404
    gateway.turns.erase([turn])
    async with gateway.client() as mine:
        assert (await mine.get(f"{PATH}/{made.id}")).status_code == 404
        answer = await mine.post(PATH, json={"model": "policy", "input": "x", "previous_response_id": made.id})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "previous_response_id"


async def test_a_reply_that_may_wait_on_a_disk_is_asked_for_again(gateway: Gateway) -> None:
    async with gateway.client() as client:
        fresh = await client.get(f"{PATH}/{responses_id(new_turn_id())}")
        unknown = await client.get(f"{PATH}/{responses_id(TurnId(uuid4()))}")
    assert (fresh.status_code, "retry-after" in fresh.headers) == (503, True)
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input.str"),
        ({"input": [{"type": "hologram"}]}, "input.0.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 7}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "image_url"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "c9", "name": "x"}]}, "input.0.arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "y"}}, "tool_choice.name"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
async def test_a_wrong_request_is_refused(gateway: Gateway, given: Any, field: str) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json={"model": "policy"} | given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"].endswith(field)
    assert gateway.turns.records == []


async def test_what_is_not_used_is_dropped_and_named(gateway: Gateway) -> None:
    given = {"model": "policy", "input": "x", "store": False, "truncation": "auto", "include": ["reasoning.encrypted"]}
    given |= {"tools": [{"type": "web_search"}, TOOL], "text": {"verbosity": "low"}, "service_tier": "auto"}
    async with gateway.client() as client:
        answer = await client.post(PATH, json=given)
    assert answer.status_code == 200
    assert answer.headers["x-clawloop-ignored"].split(", ") == [
        "include.reasoning.encrypted",
        "service_tier",
        "store",
        "text.verbosity",
        "tools.0.web_search",
        "truncation",
    ]


def test_every_published_field_is_used_or_named() -> None:
    values: dict[str, Any] = dict.fromkeys(get_type_hints(ResponseCreateParamsNonStreaming), "x")
    values |= {"tools": [TOOL], "reasoning": {"effort": "low"}, "text": {}, "tool_choice": "auto", "include": []}
    values |= {"truncation": "disabled", "stream": False, "stream_options": None, "metadata": {}}
    translated = translate_responses(values, (), [])
    refused = {"background", "conversation", "prompt"}
    assert set(translated.ignored) == set(values) - set(ResponsesRequest.model_fields) - refused - {"stream_options"}


def test_the_items_that_are_read_are_published_ones() -> None:
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png", "detail": "auto"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
    ]
    TypeAdapter(list[ResponseInputItemParam]).validate_python(items)
    translated = translate_responses({"model": "policy", "instructions": "b", "input": items}, (), [])
    assert translated.body["messages"] == [
        {"role": "system", "content": "b\n\na"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


async def test_a_reply_cut_by_its_limit_is_incomplete(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        async with client.responses.stream(model="policy", input="LONG") as stream:
            *_, last = [event async for event in stream]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    (item,) = last.response.output
    assert item.type == "message"
    assert item.status == "incomplete"


async def test_an_engine_that_breaks_fails_the_response(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json={"model": "policy", "input": "BREAK", "stream": True})
    data = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    error, failed = events("\n\n".join(data[-2:]))
    assert (error["type"], error["code"]) == ("error", "engine_broke")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    (turn,) = await gateway.recorded()
    assert turn.status is TurnStatus.ERROR


async def test_a_stream_cut_by_the_client_within_a_tool_call_is_recorded(gateway: Gateway) -> None:
    gateway.engine.halt = 4
    given = {"model": "policy", "input": "use a TOOL", "tools": [TOOL], "stream": True}
    async with gateway.client() as client:
        async with client.stream("POST", PATH, json=given) as answer:
            async for line in answer.aiter_lines():
                if "function_call_arguments.delta" in line:
                    break
    (turn,) = await gateway.recorded()
    assert turn.status is TurnStatus.ABORTED
    assert turn.response is not None
    assert turn.response["tool_calls"]


async def test_tokens_are_counted_by_the_engine(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        counted = await client.responses.input_tokens.count(model="policy", input="one two three")
    assert counted.input_tokens == 3
    assert gateway.turns.records == []


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon"], [5, 6, 7]])
async def test_a_plain_completion_is_a_side_turn(gateway: Gateway, prompt: Any) -> None:
    async with gateway.openai() as client:
        whole = await client.completions.create(model="policy", prompt=prompt, max_tokens=6)
        stream = await client.completions.create(model="policy", prompt=prompt, max_tokens=6, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    Completion.model_validate(whole.to_dict())
    assert (whole.choices[0].text, text, whole.choices[0].logprobs) == (TEXT, TEXT, None)
    turns = await gateway.recorded(2)
    assert {turn.kind for turn in turns} == {TurnKind.SIDE}
    assert [(turn.prompt_ids, turn.response_ids) for turn in turns] == [(PROMPT_IDS, IDS)] * 2
    assert turns[0].messages == [{"role": "user", "content": "Once upon" if isinstance(prompt[0], str) else ""}]
    assert "prompt" not in turns[0].sampling
    assert turn_id_of(whole.id) == turns[0].turn_id


async def test_a_completion_of_several_prompts_is_refused(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="one prompt"):
            await client.completions.create(model="policy", prompt=["a", "b"])


@pytest.mark.parametrize("path", ["embeddings", "files", "audio/speech", "moderations", "images/generations"])
async def test_what_is_not_supported_is_refused_by_name(gateway: Gateway, path: str) -> None:
    async with gateway.client() as client:
        answer = await client.post(f"/v1/{path}", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_supported"


async def test_a_look_whether_the_server_is_there_is_answered(gateway: Gateway) -> None:
    async with gateway.client() as client:
        assert (await client.head("/v1/models")).status_code == 200
        assert (await client.head("/v1/models/policy")).status_code == 200
        assert (await client.head("/v1/models/gpt-9")).status_code == 404


async def test_a_key_may_come_as_anthropic_clients_send_it(gateway: Gateway) -> None:
    async with gateway.client() as client:
        del client.headers["authorization"]
        assert (await client.get("/v1/models", headers={"x-api-key": gateway.key})).status_code == 200
        assert (await client.get("/v1/models", headers={"x-api-key": "cl-wrong"})).status_code == 401
        both = {"x-api-key": "cl-wrong", "authorization": f"Bearer {gateway.key}"}
        assert (await client.get("/v1/models", headers=both)).status_code == 200


async def test_a_file_of_text_is_read_and_another_one_refused(gateway: Gateway) -> None:
    encoded = base64.b64encode("The Rhine is 1,233 km long, the Elbe 1,094 km: größer.".encode()).decode()
    file = {"type": "input_file", "filename": "rivers.txt", "file_data": f"data:text/plain;base64,{encoded}"}
    question = {"type": "input_text", "text": "Which is longer?"}

    async def ask(*parts: Any) -> httpx.Response:
        given = {"model": "policy", "input": [{"role": "user", "content": list(parts)}]}
        async with gateway.client() as client:
            return await client.post(PATH, json=given)

    answer = await ask(file, question)
    assert answer.status_code == 200, answer.text
    said = gateway.engine.requests[-1]["messages"][-1]["content"]
    assert said.split("\n") == [
        "",
        "rivers.txt",
        "The Rhine is 1,233 km long, the Elbe 1,094 km: größer.",
        "Which is longer?",
    ]
    for data in ("data:application/pdf;base64,JVBERi0=", None):
        refused = (await ask(file | {"file_data": data}, question)).json()["error"]
        assert "no PDF" in refused["message"]
        assert "Send the text of the file" in refused["message"]
    broken = (await ask(file | {"file_data": "data:text/plain;base64,/w=="}, question)).json()["error"]
    assert broken["param"] == "input.0.content.0.file_data"


# `POST /v1/responses` on top of what is recorded, and fields whose form it refuses.


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


@pytest.mark.parametrize(
    ("part", "line", "field"),
    [
        (
            {"type": "input_file", "filename": "report.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
            "[input_file report.pdf: not readable here]",
            "type",
        ),
        ({"type": "input_file", "file_id": "file_1"}, "[input_file file_1: not readable here]", "type"),
        (
            {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,/w=="},
            "[input_file a.txt: not readable here]",
            "file_data",
        ),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg=="}}, "[input_audio: not readable here]", "type"),
        ({"type": "input_video", "video_url": "x"}, "[input_video: not readable here]", "type"),
        ({"type": "input_image", "file_id": "file_1"}, "[input_image file_1: not readable here]", "image_url"),
    ],
)
def test_what_no_engine_reads_ends_no_session(part: dict[str, Any], line: str, field: str) -> None:
    """It is refused where it is said, and a line once the conversation has gone on."""
    question = {"type": "input_text", "text": "What does it say?"}
    said = {"role": "user", "content": [part, question]}
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [part]}
    later = {"role": "user", "content": "Then only this: why?"}
    for given, place in (([later, said], "input.1.content.0"), ([later, call, result], "input.2.output.0")):
        with pytest.raises(RequestRejected) as refused:
            translate_responses({"model": "policy", "input": given}, (), [])
        assert refused.value.field == f"{place}.{field}"
    translated = translate_responses({"model": "policy", "input": [said, call, result, later]}, (), [])
    first, _, output, _ = translated.body["messages"]
    assert (first["content"], output["content"]) == (f"\n{line}\nWhat does it say?", f"\n{line}\n")
    assert translated.ignored == (f"input.0.content.0.{part['type']}", f"input.2.output.0.{part['type']}")
