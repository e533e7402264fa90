"""vLLM with the flags of `clawloop up`, on a real engine with the tiny model."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import aiohttp
import pytest

Json = dict[str, Any]
WEATHER: Json = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
MESSAGES: list[Json] = [{"role": "user", "content": "What is the weather in Köln?"}]


async def post(url: str, path: str, body: Json) -> Json:
    limit = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=limit) as session, session.post(f"{url}{path}", json=body) as answer:
        content: Json = await answer.json()
        assert answer.status == 200, content
        return content


async def chat(url: str, **body: object) -> Json:
    return await post(url, "/v1/chat/completions", {"model": "tiny-random", "messages": MESSAGES, **body})


async def test_concurrent_seeded_long_prompts_do_not_crash_the_engine(engine_url: str) -> None:
    # Each is read in many pieces.
    prompts = [[{"role": "user", "content": f"{n} hello there " * 400}] for n in range(4)]
    answers = await asyncio.gather(
        *(chat(engine_url, messages=prompt, seed=n, max_tokens=8) for n, prompt in enumerate(prompts))
    )
    assert all(answer["usage"]["prompt_tokens"] > 2048 for answer in answers)
    # Read in pieces as then, or found in the cache, a prompt has the same reply by the same seed.
    again = [await chat(engine_url, messages=prompt, seed=n, max_tokens=8) for n, prompt in enumerate(prompts)]
    texts = [[answer["choices"][0]["message"]["content"] for answer in each] for each in (answers, again)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(prompts)


async def test_the_models_sampling_defaults_are_not_applied(engine_url: str) -> None:
    answer = await chat(engine_url, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=20)
    for token in answer["choices"][0]["logprobs"]["content"]:
        # With the model's top_k of 20 these tokens would have all the probability.
        assert sum(math.exp(other["logprob"]) for other in token["top_logprobs"]) < 0.999


async def test_every_token_of_a_reply_has_its_id_and_log_prob(engine_url: str) -> None:
    answer = await chat(engine_url, max_tokens=50, ignore_eos=True, logprobs=True, return_token_ids=True, n=2)
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 50
    rendered = await post(engine_url, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": True})
    assert answer["prompt_token_ids"] == rendered["tokens"]


@pytest.mark.parametrize("tools", [None, [WEATHER]])
async def test_replies_without_thinking_are_content(engine_url: str, tools: list[Json] | None) -> None:
    message = (await chat(engine_url, max_tokens=20, ignore_eos=True, tools=tools))["choices"][0]["message"]
    assert message["content"]
    assert message["reasoning"] is None


async def test_a_hermes_tool_call_is_parsed(engine_url: str) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    answer = await chat(engine_url, tools=[WEATHER], max_tokens=200, structured_outputs={"choice": [call]})
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (tool_call,) = choice["message"]["tool_calls"]
    assert tool_call["function"]["name"] == "get_weather"
    assert json.loads(tool_call["function"]["arguments"]) == {"city": "Köln"}
