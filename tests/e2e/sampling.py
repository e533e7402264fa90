"""vLLM in one process, with one model after another: importing it takes longer than what is asked of a tiny model.

    python -m tests.e2e.sampling < WORK

WORK is JSON, a list of models; prints for each, as JSON, the tokens sampled without and with an adapter, and their
log-probs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from clawloop.app.layout.table import engine_environment
from clawloop.app.local.services.vllm import LORA_TARGETS

TEMPERATURE = 0.7
TOKENS = 40
MARK = "sampled "


def sample(model: str, dtype: str, adapter: str, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Of each prompt, a reply by the base model and one by the adapter, all of them computed together."""
    # The variables have to be set before.
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 * 2**20,
        distributed_executor_backend="uni",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=list(LORA_TARGETS),
        max_num_batched_tokens=128,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=TOKENS, ignore_eos=True, logprobs=0, seed=1)
    one = LoRARequest("one", 1, adapter)
    asked = [(prompt, lora) for prompt in prompts for lora in (None, one)]
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    answers = llm.generate(inputs, params, lora_request=[lora for _, lora in asked], use_tqdm=False)
    for (prompt, lora), answer in zip(asked, answers, strict=True):
        [reply] = answer.outputs
        tokens = list(reply.token_ids)
        chosen = [position[token].logprob for position, token in zip(reply.logprobs, tokens, strict=True)]
        yield {"adapted": lora is not None, "prompt": prompt, "tokens": tokens, "logprobs": chosen}


def main() -> None:
    os.environ |= engine_environment(())
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for work in json.load(sys.stdin):
        answers = list(sample(**work))
        sys.stdout.write(f"\n{MARK}{json.dumps(answers)}\n")
        sys.stdout.flush()
        gc.collect()  # the model before


if __name__ == "__main__":
    main()
