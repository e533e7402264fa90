"""Anthropic's and OpenAI's other wire formats on a real engine: the same tokens as a chat, by the official SDKs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic as anthropic_sdk
import httpx
import openai as openai_sdk
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from clawloop.core.contracts.episodes import NewGroup
from clawloop.core.contracts.turns import StoredTurn, TurnKind
from clawloop.core.ids import new_rollout_group_id
from db.database import BACKGROUND_LIMIT, Database
from db.episodes.groups import PostgresEpisodeStore
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.pictures import asks_about, data_url, png

SYSTEM = "You help."
PARAMETERS: dict[str, object] = {"type": "object", "properties": {"command": {"type": "string"}}}


@pytest.fixture(scope="module")
async def gateway(postgres_server: Any, engine_url: str, tmp_path_factory: Any) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE wire_formats")
    url = database_address(postgres_server.url, "wire_formats")
    await asyncio.to_thread(migrate, url)
    async with running_gateway(url, await prepared(url, [engine_url]), tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
async def anthropic(gateway: RealGateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def openai(gateway: RealGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        yield client


def difference(model: Any, stored: StoredTurn) -> float:
    """Mean absolute difference between stored log-probs and those of the stored ids, at the recorded temperature."""
    turn = stored.record
    assert turn.prompt_ids
    assert turn.response_ids
    assert turn.logprobs
    with torch.no_grad():
        logits_TV = model(torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0, len(turn.prompt_ids) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV.float() / turn.sampling["temperature"], dim=-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0]
    return float((chosen_T - torch.tensor(turn.logprobs)).abs().mean())


async def test_all_formats_record_the_tokens_of_a_chat(
    gateway: RealGateway, anthropic: AsyncAnthropic, openai: AsyncOpenAI, tiny_model_path: Path
) -> None:
    question: Any = {"role": "user", "content": "Tell me a tale."}
    function: Any = {"name": "exec", "parameters": PARAMETERS}
    chat = await openai.chat.completions.create(
        model="policy",
        messages=[{"role": "system", "content": SYSTEM}, question],
        tools=[{"type": "function", "function": function}],
        max_tokens=16,
        seed=3,
    )
    message = await anthropic.messages.create(
        model="policy",
        system=SYSTEM,
        messages=[question],
        tools=[{"name": "exec", "input_schema": PARAMETERS}],
        max_tokens=16,
        extra_body={"seed": 3},
    )
    response = await openai.responses.create(
        model="policy",
        instructions=SYSTEM,
        input=[question],
        tools=[{"type": "function", "name": "exec", "parameters": PARAMETERS, "strict": None}],
        max_output_tokens=16,
        extra_body={"seed": 3},
    )
    turns = [await gateway.turn(reply.id) for reply in (chat, message, response)]
    assert turns[0].record.prompt_ids
    for turn in turns:
        assert turn.record.prompt_ids == turns[0].record.prompt_ids
        assert turn.record.response_ids == turns[0].record.response_ids
        assert turn.record.response == turns[0].record.response
    assert message.usage.input_tokens == len(turns[0].record.prompt_ids)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    assert difference(reference, turns[1]) < 1e-5
    assert difference(reference, turns[2]) < 1e-5


async def test_a_forced_call_has_the_arguments_of_its_schema(
    gateway: RealGateway, anthropic: AsyncAnthropic, openai: AsyncOpenAI
) -> None:
    """A model of random weights would write anything, such as `true`."""
    question: Any = {"role": "user", "content": "Be quiet?"}
    schema: Any = {"type": "object", "properties": {"quiet": {"type": "boolean"}}, "required": ["quiet"]}
    schema |= {"additionalProperties": False}
    function: Any = {"name": "set", "parameters": schema}
    arguments: list[Any] = []
    for seed in range(3):
        sent: Any = {"model": "policy", "extra_body": {"seed": seed}}
        chat = await openai.chat.completions.create(
            messages=[question], tools=[{"type": "function", "function": function}], tool_choice="required", **sent
        )
        message = await anthropic.messages.create(
            messages=[question],
            tools=[{"name": "set", "input_schema": schema}],
            tool_choice={"type": "tool", "name": "set"},
            max_tokens=500,
            **sent,
        )
        made = [call.function.arguments for call in chat.choices[0].message.tool_calls or () if call.type == "function"]
        arguments += map(json.loads, made)
        arguments += [block.input for block in message.content if block.type == "tool_use"]
    assert len(arguments) >= 6
    assert all(isinstance(given, dict) and set(map(type, given.values())) == {bool} for given in arguments), arguments


async def test_streams_end_with_what_was_recorded(
    gateway: RealGateway, anthropic: AsyncAnthropic, openai: AsyncOpenAI
) -> None:
    async with anthropic.messages.stream(
        model="policy", messages=[{"role": "user", "content": "A word, please."}], max_tokens=12
    ) as streamed:
        message = await streamed.get_final_message()
    async with openai.responses.stream(model="policy", input="A word, please.", max_output_tokens=12) as events:
        *_, last = [event async for event in events]
    assert last.type in ("response.completed", "response.incomplete")
    for reply, text in (
        (message, "".join(block.text for block in message.content if block.type == "text")),
        (last.response, last.response.output_text),
    ):
        record = (await gateway.turn(reply.id)).record
        assert record.response is not None
        assert record.response["content"] == text
        assert reply.usage is not None
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
            len(record.prompt_ids or ()),
            len(record.response_ids or ()),
        )


async def test_tokens_are_counted_as_the_engine_renders_them(
    gateway: RealGateway, anthropic: AsyncAnthropic, openai: AsyncOpenAI
) -> None:
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "How long is this?"}], "system": SYSTEM}
    asked["tools"] = [{"name": "exec", "input_schema": PARAMETERS}]
    counted = await anthropic.messages.count_tokens(**asked)
    message = await anthropic.messages.create(**asked, max_tokens=2)
    assert counted.input_tokens == message.usage.input_tokens
    other = await openai.responses.input_tokens.count(model="policy", instructions=SYSTEM, input="How long is this?")
    assert 0 < other.input_tokens < counted.input_tokens


async def test_a_conversation_goes_on_from_a_recorded_response(gateway: RealGateway, openai: AsyncOpenAI) -> None:
    first = await openai.responses.create(model="policy", input="One.", max_output_tokens=8)
    await gateway.turn(first.id)
    second = await openai.responses.create(
        model="policy", previous_response_id=first.id, input="Two.", max_output_tokens=8
    )
    one, two = await gateway.turn(first.id), await gateway.turn(second.id)
    assert two.session_id == one.session_id
    assert two.parent_turn_id == one.record.turn_id
    assert (await openai.responses.retrieve(second.id)).output_text == second.output_text


async def test_a_plain_completion_is_recorded_as_a_side_turn(gateway: RealGateway, openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(model="policy", prompt="Once upon a time", max_tokens=6)
    stream = await openai.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=6, stream=True)
    chunks = [chunk async for chunk in stream]
    of_text, of_ids = (await gateway.turn(whole.id)).record, (await gateway.turn(chunks[0].id)).record
    assert (of_text.kind, of_ids.kind) == (TurnKind.SIDE, TurnKind.SIDE)
    assert of_text.response is not None
    assert of_text.response["content"] == whole.choices[0].text
    assert of_ids.prompt_ids == [5, 6, 7]
    for record in (of_text, of_ids):
        assert record.response_ids
        assert record.logprobs is not None


async def test_a_model_that_sees_no_images_refuses_them_in_every_format(
    gateway: RealGateway, anthropic: AsyncAnthropic, openai: AsyncOpenAI
) -> None:
    """What the engine says reaches the client; there is no reply, so nothing is recorded or trained."""
    asked: Any = asks_about(png())
    encoded = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    block: Any = {"role": "user", "content": [{"type": "image", "source": encoded}]}
    part: Any = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(png())}]}
    requests = (
        openai.chat.completions.create(model="policy", messages=[asked], max_tokens=4),
        anthropic.messages.create(model="policy", messages=[block], max_tokens=4),
        openai.responses.create(model="policy", input=[part], max_output_tokens=16),
    )
    for request in requests:
        with pytest.raises((openai_sdk.BadRequestError, anthropic_sdk.BadRequestError), match="multimodal"):
            await request
    async with httpx.AsyncClient(
        base_url=gateway.url, headers={"Authorization": f"Bearer {gateway.admin_key}"}
    ) as admin:
        assert (await admin.get(f"/admin/v1/files/{sha256(png()).hexdigest()}")).status_code == 404


async def test_an_episodes_key_is_answered_in_every_format_and_its_turns_can_be_trained(
    gateway: RealGateway, tiny_model_path: Path
) -> None:
    """What a gateway sends with such a key, and with no other, once made vLLM refuse every episode."""
    database = Database(gateway.database_url, BACKGROUND_LIMIT)
    episodes = PostgresEpisodeStore(database)
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", 2)
    await episodes.make_group(group)
    begun = await episodes.begin_episode(group.id, 0, 1, timedelta(hours=1))
    key = await episodes.key_of(begun.id)
    question: Any = {"role": "user", "content": "What is 3 + 4?"}
    # What a client asks for that cannot be trained.
    asked: Any = {"model": "policy", "extra_body": {"temperature": 0.2, "top_p": 0.5}}
    sdk: Any = {"api_key": key, "max_retries": 0}
    async with (
        AsyncOpenAI(base_url=f"{gateway.url}/v1", **sdk) as openai,
        AsyncAnthropic(base_url=gateway.url, **sdk) as anthropic,
    ):
        chat = await openai.chat.completions.create(messages=[question], max_tokens=12, **asked)
        message = await anthropic.messages.create(messages=[question], max_tokens=12, **asked)
        response = await openai.responses.create(input=[question], max_output_tokens=12, **asked)
        turns = [await gateway.turn(reply.id) for reply in (chat, message, response)]
    await database.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    for turn in turns:
        assert (turn.record.episode_id, turn.record.kind) == (begun.id, TurnKind.MAIN)
        assert {name: turn.record.sampling[name] for name in ("temperature", "top_p")} == {"temperature": 1, "top_p": 1}
        assert difference(model, turn) < 1e-5
