"""An engine with four-bit weights on a CPU: it loads adapters, its log-probs are right, and its model can think.

The trainer has the weights unquantised; how far apart the two are is what `correction = "decoupled"` takes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from clawloop.families.thinking import Thinking
from clawloop.ids import version_name
from clawloop.judging.prompts import AnswerForm, hint_prompt, vote_prompt
from clawloop.local.checks import choose_port
from clawloop.local.services.vllm import read_model
from clawloop.serving import judge as judging
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.e2e.adapters import apply_adapter, load_policy, logprobs, random_versions
from tests.e2e.conftest import START_SECONDS, running_engine
from tests.e2e.quantised import quantise
from tests.engine_options import engine_options
from tests.unit.judging.conversations import TURN, evidence

QWEN3_TEMPLATE = Path(__file__).parents[1] / "unit" / "families" / "templates" / "qwen3.jinja"
TEMPERATURE = 0.7
pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_SECONDS + 300)]


@dataclass(frozen=True)
class Quantised:
    """
    Attributes:
        url: of the engine.
        plain: the folder with what the four-bit weights stand for.
        unquantised: the folder they were made from.
    """

    url: str
    name: str
    plain: Path
    unquantised: Path


@pytest.fixture(scope="module", params=["awq", pytest.param("gptq", marks=pytest.mark.long)])
def engine(
    request: pytest.FixtureRequest, flat_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Quantised]:
    folder = tmp_path_factory.mktemp(request.param)
    quantised, plain = folder / "tiny-four-bits", folder / "plain"
    quantise(flat_model_path, quantised, plain, request.param, QWEN3_TEMPLATE.read_text())
    assert read_model(quantised).chat.thinking is Thinking.OPTIONAL
    # The layout of the unquantised model: adapters and lengths are the same, and its weights take more memory.
    port = choose_port("vLLM", "127.0.0.1", 0, "")
    options = engine_options(plain, port, dtype="bfloat16", max_model_len=2048)
    with running_engine(quantised, options, folder / "vllm.log") as url:
        yield Quantised(url, quantised.name, plain, flat_model_path)


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def reply(engine: Quantised, model: str, **fields: object) -> Any:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me about rain."}],
        "temperature": TEMPERATURE,
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    return await post(engine.url, "/v1/chat/completions", body | fields)


def off(model: Path, answer: Any, adapter: Path | None = None) -> float:
    """The mean difference of the engine's log-probs from those of a model in float32."""
    policy = load_policy(model)
    apply_adapter(policy, adapter)
    choice = answer["choices"][0]
    by_engine = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    expected = logprobs(policy, answer["prompt_token_ids"], choice["token_ids"], TEMPERATURE)
    return float((expected - by_engine).abs().mean())


async def test_log_probs_and_adapters_on_four_bit_weights(engine: Quantised, tmp_path: Path) -> None:
    answer = await reply(engine, engine.name, seed=1)
    of_base = off(engine.plain, answer)
    # What bf16 leaves; the weights themselves are further from those they were made from.
    assert of_base < 0.01 < off(engine.unquantised, answer)

    (version,) = random_versions(engine.plain, tmp_path, [1])
    name, folder = version_name("default", 1, engine.name), tmp_path / version.path
    await post(engine.url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    answer = await reply(engine, name, seed=1)
    assert off(engine.plain, answer, folder) < 0.01 < off(engine.plain, answer)


async def test_the_judge_of_a_model_that_can_think_thinks_within_its_budget(
    engine: Quantised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "THINKING_TOKENS", 24)
    monkeypatch.setattr(judging, "FREE_TOKENS", 64)
    async with JudgeClient(lambda policy: [Endpoint(engine.url, engine.name)], None) as client:
        form = await client.form("default", "auto")
        assert form is AnswerForm.FREE
        for prompt in (vote_prompt(TURN, evidence(), form), hint_prompt(TURN, evidence(), form)):
            answers = await client.answers("default", prompt, 3, 0.6)
            assert len(answers) == 3
            # Random weights give no answer; what they thought is not among it.
            assert all("<think>" not in answer.text and "</think>" not in answer.text for answer in answers)
        bare = vote_prompt(TURN, evidence(), AnswerForm.GRAMMAR)
        assert set(await client.distribution("default", bare)) == {-1, 0, 1}


async def test_the_engine_ends_thinking_at_the_budget(engine: Quantised) -> None:
    (end,) = (await post(engine.url, "/tokenize", {"prompt": "</think>", "add_special_tokens": False}))["tokens"]
    answer = await reply(
        engine, engine.name, thinking_token_budget=16, chat_template_kwargs={"enable_thinking": True}, seed=2
    )
    choice = answer["choices"][0]
    assert end in choice["token_ids"][:24]
    assert choice["message"]["content"]
