"""Stored tokens are those of the engine: log-probs recomputed with transformers on the stored ids agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import psycopg
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from clawloop.core.contracts.turns import StoredTurn, TurnRecord, TurnStatus
from clawloop.core.ids import TurnId
from clawloop.core.ids import response_id as id_of
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.gateway import RealGateway, prepared, running_gateway

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "exec", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls -l"}}\n</tool_call>'


def ask(*messages: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
    as_messages = [{"role": "user", "content": text} if isinstance(text, str) else text for text in messages]
    return {"model": "policy", "messages": as_messages, "max_tokens": 24, **fields}


async def streamed(gateway: RealGateway, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The response id and all chunks of a stream read to its end."""
    async with gateway.client() as client:
        answer = await client.post(PATH, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [orjson.loads(line) for line in lines[:-1]]
    return chunks[0]["id"], chunks


async def whole(gateway: RealGateway, body: dict[str, Any]) -> dict[str, Any]:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def recomputed(model: Any, turn: TurnRecord) -> torch.Tensor:
    """Log-probs of the stored response ids after the stored prompt ids, at the recorded temperature; float32, (T,)."""
    assert turn.prompt_ids is not None
    assert turn.response_ids is not None
    ids = torch.tensor([turn.prompt_ids + turn.response_ids])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].float()
    temperature = turn.sampling["temperature"]
    assert isinstance(temperature, float)
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0]


def difference(model: Any, stored: StoredTurn) -> float:
    """Mean absolute difference between stored and recomputed log-probs."""
    logprobs = stored.record.logprobs
    assert logprobs
    return float((recomputed(model, stored.record) - torch.tensor(logprobs)).abs().mean())


@pytest.fixture(scope="module")
def reference(tiny_model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)


@pytest.fixture(scope="module")
async def gateway(postgres_server: Any, engine_url: str, tmp_path_factory: Any) -> AsyncIterator[RealGateway]:
    async for running in _gateway(postgres_server, engine_url, tmp_path_factory.mktemp("gateway"), "tokens"):
        yield running


async def _gateway(server: Any, engine: str, data: Path, name: str) -> AsyncIterator[RealGateway]:
    execute(server.url, f"CREATE DATABASE {name}")
    url = database_address(server.url, name)
    await asyncio.to_thread(migrate, url)
    async with running_gateway(url, await prepared(url, [engine]), data) as running:
        yield running


@pytest.mark.parametrize("temperature", [None, 1.0, 1.7])
async def test_log_probs_agree_at_the_recorded_settings(
    gateway: RealGateway, reference: Any, temperature: float | None
) -> None:
    response_id, _ = await streamed(gateway, ask("Tell me a tale.", temperature=temperature))
    by_stream = await gateway.turn(response_id)
    by_body = await gateway.turn((await whole(gateway, ask("And another.", temperature=temperature)))["id"])
    assert by_stream.record.sampling["temperature"] == (temperature or 0.6)
    assert difference(reference, by_stream) < 1e-5
    assert difference(reference, by_body) < 1e-5
    wrong = difference(reference, _with_temperature(by_stream, 0.9))
    assert wrong > 1e-2


async def test_a_streamed_turn_equals_an_unstreamed_one(gateway: RealGateway) -> None:
    body = ask("Same seed, same tokens.", seed=7, temperature=1.0)
    response_id, chunks = await streamed(gateway, body)
    one = (await gateway.turn(response_id)).record
    other_body = await whole(gateway, body)
    other = (await gateway.turn(other_body["id"])).record
    assert one.response_ids == other.response_ids
    assert one.prompt_ids == other.prompt_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert one.response == other.response
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == other_body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_that_ends_a_reply_is_recorded(
    gateway: RealGateway, tiny_model_path: Path, stream: bool
) -> None:
    body = ask("Yes or no?", max_tokens=50, structured_outputs={"choice": ["No."]})
    response_id = (await streamed(gateway, body))[0] if stream else (await whole(gateway, body))["id"]
    turn = (await gateway.turn(response_id)).record
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    assert turn.finish_reason == "stop"
    assert turn.response_ids is not None
    assert turn.logprobs is not None
    assert tokenizer.decode(turn.response_ids[:-1]) == "No."
    # The grammar allows every token that ends a reply, and the model draws one of them.
    assert turn.response_ids[-1] in GenerationConfig.from_pretrained(tiny_model_path).eos_token_id
    assert len(turn.logprobs) == len(turn.response_ids)


async def test_a_streamed_tool_call_has_every_token(gateway: RealGateway, engine_url: str) -> None:
    body = ask("List the files.", tools=[TOOL], tool_choice="auto", max_tokens=200, seed=3, temperature=1.0)
    body["structured_outputs"] = {"choice": [CALL]}
    response_id, chunks = await streamed(gateway, body)
    assert any(chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks)
    turn = (await gateway.turn(response_id)).record
    assert turn.finish_reason == "tool_calls"
    assert turn.response is not None
    calls: Any = turn.response["tool_calls"]
    assert [orjson.loads(call["function"]["arguments"]) for call in calls] == [{"command": "ls -l"}]
    directly = await _asked_directly(engine_url, turn, body)
    assert turn.response_ids == directly["choices"][0]["token_ids"]
    assert turn.prompt_ids == directly["prompt_token_ids"]
    engine_logprobs = [entry["logprob"] for entry in directly["choices"][0]["logprobs"]["content"]]
    assert turn.logprobs == pytest.approx(engine_logprobs, abs=1e-5)


async def test_replies_cut_by_length_or_by_the_client_have_their_tokens(gateway: RealGateway, reference: Any) -> None:
    response_id, _ = await streamed(gateway, ask("A very long tale.", max_tokens=5, ignore_eos=True))
    cut = await gateway.turn(response_id)
    assert (cut.record.status, len(cut.record.response_ids or ())) == (TurnStatus.LENGTH, 5)
    assert difference(reference, cut) < 1e-5
    async with gateway.client() as client:
        body = ask("A longer tale.", max_tokens=2000, ignore_eos=True, stream=True)
        async with client.stream("POST", PATH, json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                if line:
                    seen += 1
                    response_id = orjson.loads(line.removeprefix("data: "))["id"]
                if seen == 12:
                    break
    aborted = await gateway.turn(response_id)
    assert aborted.record.status is TurnStatus.ABORTED
    assert 11 <= len(aborted.record.response_ids or ()) < 2000
    assert difference(reference, aborted) < 1e-5


async def test_n_choices_are_n_turns_each_with_its_tokens(gateway: RealGateway, reference: Any) -> None:
    response_id, chunks = await streamed(gateway, ask("One of three.", n=3, temperature=1.0, ignore_eos=True))
    first = await gateway.turn(response_id)
    turns = [await gateway.turn(id_of(turn_id)) for turn_id in await group(gateway, first.record.turn_id)]
    assert [turn.record.choice for turn in turns] == [0, 1, 2]
    assert turns[0] == first
    assert len({tuple(turn.record.response_ids or ()) for turn in turns}) == 3
    for turn in turns:
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == turn.record.choice]
        assert turn.record.response is not None
        assert turn.record.response["content"] == "".join(choice["delta"].get("content") or "" for choice in deltas)
        assert turn.record.prompt_ids == first.record.prompt_ids
        assert difference(reference, turn) < 1e-5


async def group(gateway: RealGateway, first: TurnId, size: int = 3) -> list[TurnId]:
    """The turns of one request in order of their choice, once all are in PostgreSQL."""
    query = "SELECT id FROM turns WHERE group_id = %s ORDER BY choice"
    async with (
        asyncio.timeout(60),
        await psycopg.AsyncConnection.connect(gateway.database_url, autocommit=True) as connection,
    ):
        while len(rows := await (await connection.execute(query, [first])).fetchall()) < size:
            await asyncio.sleep(0.1)
    return [TurnId(turn_id) for (turn_id,) in rows]


async def test_turns_with_thinking_have_parents_although_prompts_drop_the_thinking(
    gateway: RealGateway, reference: Any
) -> None:
    body = ask("Think first.", structured_outputs={"choice": ["<think>\nhmm\n</think>\n\nYes."]}, max_tokens=60)
    first = await whole(gateway, body)
    answer = first["choices"][0]["message"]
    assert "<think>" in answer["content"]
    dropped = {"role": "assistant", "content": "Yes."}
    second = await whole(gateway, ask("Think first.", dropped, "Thanks, and now?"))
    stored = await gateway.turn(second["id"])
    parent = await gateway.turn(first["id"])
    assert stored.parent_turn_id == parent.record.turn_id
    assert stored.session_id == parent.session_id
    assert difference(reference, stored) < 1e-5
    reply = await whole(gateway, ask("Think first.", answer, "Thanks, and now?"))
    same = await gateway.turn(reply["id"])
    assert same.parent_turn_id == parent.record.turn_id
    assert same.record.prompt_ids == stored.record.prompt_ids


@pytest.mark.long
async def test_bf16_and_a_model_with_sampling_defaults_of_its_own(
    postgres_server: Any, careless_engine_url: str, flat_model_path: Path, tmp_path: Path
) -> None:
    settings = orjson.loads((flat_model_path / "generation_config.json").read_bytes())
    assert settings["top_k"] == 20
    assert settings["top_p"] < 1
    model = AutoModelForCausalLM.from_pretrained(flat_model_path, dtype=torch.bfloat16)
    async for gateway in _gateway(postgres_server, careless_engine_url, tmp_path / "gateway", "bf16"):
        stored = []
        for text in ("One.", "Two.", "Three."):
            response_id, _ = await streamed(gateway, ask(text, max_tokens=60))
            stored.append(await gateway.turn(response_id))
        assert max(difference(model, turn) for turn in stored) < 0.01
        # With the model's top_k of 20, log-probs would be normalised over the 20 likeliest tokens.
        guarded = await whole(gateway, ask("Four.", max_tokens=60, top_k=20))
        assert difference(model, await gateway.turn(guarded["id"])) > 0.1


def _with_temperature(stored: StoredTurn, temperature: float) -> StoredTurn:

    return replace(
        stored, record=replace(stored.record, sampling=stored.record.sampling | {"temperature": temperature})
    )


async def _asked_directly(engine_url: str, turn: TurnRecord, body: dict[str, Any]) -> dict[str, Any]:
    sent = {**turn.sampling, **body, "model": "tiny-random", "logprobs": True, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{engine_url}{PATH}", json=sent)
    answer.raise_for_status()
    parsed: dict[str, Any] = answer.json()
    return parsed
