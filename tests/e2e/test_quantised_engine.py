"""A quantised copy in vLLM beside a trainer that keeps the model in 4 bits: a step on what the engine sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Loss
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.lone_engine import MIB, Start, running_engine
from tests.quantised_copy import Method, write_copy
from tests.random_model import QWEN3_27M, write_random_model
from tests.training.steps import RECIPE, completed, never, setup_of, step_of
from tests.training.tiny import sample_id

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

PROMPTS = [[100 + (7 * n + place) % 300 for place in range(40 + n)] for n in range(6)]
TOKENS = 24


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_step_on_what_a_quantised_engine_sampled_makes_a_version_that_it_serves(
    method: Method, tmp_path: Path
) -> None:
    model = write_random_model(tmp_path / "model", QWEN3_27M)
    copy = write_copy(model, tmp_path / "copy", method)
    loss = Loss(kl=0.1, correction="decoupled")
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"loss": loss})})
    setup = setup_of(
        model,
        tmp_path / "adapters",
        base_model="model",
        quantise="nf4",
        engines_quantised=True,
        dtype="bfloat16",
        micro_batch_tokens=512,
    )
    with running_engine(Start(copy, cache=128 * MIB), tmp_path / "vllm.log") as engine:
        replies = [engine.sample(prompt, TOKENS) for prompt in PROMPTS]
        samples = [
            BatchSample(
                sample_id=sample_id(number),
                prompt_ids=prompt,
                response_ids=tokens,
                logprobs=logprobs,
                temperature=1.0,
                version=0,
                reward=1.0 if number % 2 else -1.0,
            )
            for number, (prompt, (tokens, logprobs)) in enumerate(zip(PROMPTS, replies, strict=True))
        ]
        step = step_of(samples, 1, base_model="model", recipe=recipe)
        trained = completed(StepRunner(setup).train(step, ignore_status, never))
        # The two differ by a fraction of a nat a token, and none of that is in the clipped ratio.
        assert len(trained.figures.samples) == len(PROMPTS)
        for metrics in trained.figures.samples.values():
            assert metrics.mean_abs_log_ratio is not None
            assert metrics.mean_abs_log_ratio > 0.05
            assert metrics.clip_share == 0
        engine.load("one", tmp_path / "adapters" / trained.version.path)
        text = [*PROMPTS[0], *replies[0][0]]
        before, after = engine.score(text), engine.score(text, "one")
        moved = [abs(new - old) for new, old in zip(after, before, strict=True)]
        assert 1e-4 < sum(moved) / len(moved) < 1
        tokens, logprobs = engine.sample(PROMPTS[0], TOKENS, "one")
        assert len(tokens) == len(logprobs) == TOKENS
