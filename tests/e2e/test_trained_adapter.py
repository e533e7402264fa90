"""A step's adapter in vLLM gives the same log-probs as in the trainer, and others than the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import torch

from clawloop.core.contracts.training import BatchSample
from clawloop.core.ids import SampleId, version_name
from clawloop.core.recipes.recipe import Optimiser
from clawloop.training.adapters.files import read_adapter
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, set_adapter
from clawloop.training.packing import TokenSequence, collate
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.training.steps import RECIPE, completed, never, setup_of, step_of

TEMPERATURE = 0.7
SUBJECTS = ("cats", "rain", "trains", "salt", "bridges", "music")


async def post(url: str, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer


async def sample_reply(url: str, model: str, question: str, seed: int) -> BatchSample:
    """Sample one reply, as the gateway would record it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": TEMPERATURE,
        "seed": seed,
        "max_tokens": 40,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = await (await post(url, "/v1/chat/completions", body)).json()
    choice = answer["choices"][0]
    return BatchSample(
        sample_id=SampleId(UUID(int=seed)),
        prompt_ids=answer["prompt_token_ids"],
        response_ids=choice["token_ids"],
        logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
        temperature=TEMPERATURE,
        version=0,
        reward=1.0 if seed % 2 else -1.0,
    )


async def test_the_engine_and_the_trainer_agree_on_an_adapters_log_probs(
    engine_url: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    base = tiny_model_path.name
    samples = [
        await sample_reply(engine_url, base, f"Tell me about {what}.", seed) for seed, what in enumerate(SUBJECTS)
    ]
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"optimiser": Optimiser(lr=2e-2)})})
    trainer = StepRunner(setup_of(tiny_model_path, tmp_path, base_model=None, micro_batch_tokens=512))
    trained = completed(
        trainer.train(step_of(samples, 1, policy="parity", base_model=base, recipe=recipe), ignore_status, never)
    )
    # Engine and trainer agree on the base model, so the mean ratio of its first step is 1.
    assert abs(trained.figures.ratio - 1) < 1e-4

    name = version_name("parity", 1, base)
    folder = tmp_path / trained.version.path
    await post(engine_url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    try:
        replies = [await sample_reply(engine_url, name, f"What is {what}?", seed) for seed, what in enumerate(SUBJECTS)]
    finally:
        await post(engine_url, "/v1/unload_lora_adapter", {"lora_name": name})

    lora = LoraShape(recipe.train.lora.rank, recipe.train.lora.alpha)
    model = load_model(tiny_model_path, lora, dtype=torch.float32, device=torch.device("cpu"))
    of_base = [logprobs(model, reply) for reply in replies]
    set_adapter(model, read_adapter(folder).tensors)
    of_version = [logprobs(model, reply) for reply in replies]
    by_engine = torch.tensor([logprob for reply in replies for logprob in reply.logprobs])
    off = (torch.cat(of_version) - by_engine).abs()
    # Measured in float32 on both sides: mean 2e-7, largest 7e-6.
    assert float(off.mean()) < 1e-5
    assert float(off.max()) < 1e-4
    # The adapter has an effect: without it they differ.
    assert float((torch.cat(of_base) - by_engine).abs().mean()) > 1e-2


def logprobs(model: PolicyModel, reply: BatchSample) -> torch.Tensor:
    sequence = TokenSequence("reply", reply.prompt_ids, reply.response_ids, reply.temperature)
    with torch.no_grad():
        found: torch.Tensor = model(collate([sequence], [0])).logprobs_N
    return found
