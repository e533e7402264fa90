"""The training steps that `benchmarks.train` compares; each contender is a process that reads commands.

PEFT's and torchtune's are written as a careful user would: the batch sorted by length and padded on the right, so that
attention needs no mask; loss and KL written out. All compute the same step: reference log-probs with the adapter off,
PPO clip, k2, clipped gradient, AdamW; activation checkpointing of each layer.

Run as `python -m benchmarks.train_contenders NAME FOLDER`. A line on standard input is a command, a JSON line the
answer: `step` takes a step, `profile` takes one under torch's profiler.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import profile

from benchmarks.train_case import Case, Paths, with_hints
from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import MOST_HINTS, Train, load_recipe
from clawloop.training.batch import plain_sequence
from clawloop.training.options import Backend
from clawloop.training.ranks import ProgressCallback

Step = Callable[[], float]
"""Computes a step and returns its loss."""
Read = Callable[["MicroBatch"], Tensor]
"""Returns the N response tokens' log-probs."""

_RECIPES = Path(__file__).resolve().parents[1] / "deploy" / "recipes"
# As in torchtune's LoRA recipes.
_OUTPUT_CHUNKS = 8


def our_step(
    paths: Paths,
    case: Case,
    recipe: Train,
    *,
    share_prefixes: bool = True,
    backend: Backend | None = None,
    on_progress: ProgressCallback | None = None,
    hints: int | None = None,
) -> Step:
    """Our trainer's step; without `share_prefixes` a shared prefix is computed for each sample.

    Args:
        hints: of each sample, by the recipe `hybrid` with its control; None: by `recipe`, without any.
    """
    from clawloop.training.adapters.files import read_adapter
    from clawloop.training.model.loading import load_model
    from clawloop.training.model.port import set_adapter
    from clawloop.training.step import make_optimizer, train_step

    device = torch.device(case.device)
    model = load_model(
        paths.checkpoint,
        case.lora,
        dtype=case.torch_dtype,
        device=device,
        max_tokens=case.max_tokens,
        backend=backend,
    )
    set_adapter(model, read_adapter(paths.adapter).tensors)
    optimizer = make_optimizer(model, recipe.optimiser)
    samples = paths.samples()
    if hints is not None:
        recipe = load_recipe(_RECIPES / "hybrid.toml").train
        samples = with_hints(samples, hints, case)
    limits = replace(case.limits, share_prefixes=share_prefixes)
    return lambda: train_step(model, optimizer, samples, recipe, limits, parent=1, on_progress=on_progress).loss


def peft_step(paths: Paths, case: Case, recipe: Train) -> Step:
    """PEFT on transformers; adapter in float32 under autocast, as ours, when the model is bfloat16."""
    from peft import PeftModel
    from peft.helpers import disable_input_dtype_casting
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        paths.checkpoint, dtype=case.torch_dtype, attn_implementation="sdpa", device_map=case.device
    )
    model = PeftModel.from_pretrained(base, str(paths.adapter), is_trainable=True)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def read(batch: MicroBatch) -> Tensor:
        # Autocast casts inputs; PEFT would cast each one to float32 first.
        autocast = torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bfloat16")
        with autocast, disable_input_dtype_casting(model):
            hidden_BSD = base.model(input_ids=batch.tokens_BS, use_cache=False).last_hidden_state
            return batch.logprobs(base.lm_head(hidden_BSD.flatten(0, 1)[batch.rows_N]))

    return _plain_step(read, model.disable_adapter, model, case, recipe, paths.samples())


def torchtune_step(paths: Paths, case: Case, recipe: Train) -> Step:
    """torchtune's own LoRA model in its LoRA recipe's loop: outputs in chunks, fused AdamW, all in one dtype."""
    from torchtune import training
    from torchtune.models.qwen2 import lora_qwen2
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.peft import disable_adapter, get_adapter_params, set_trainable_params

    from clawloop.training.adapters.files import read_adapter
    from clawloop.training.model.base_weights import BaseWeights
    from clawloop.training.model.checkpoint import adapter_names, read_architecture

    architecture = read_architecture(paths.checkpoint)
    device = torch.device(case.device)
    with training.set_default_dtype(case.torch_dtype), device:
        model = lora_qwen2(
            ["q_proj", "k_proj", "v_proj", "output_proj"],
            apply_lora_to_mlp=True,
            vocab_size=architecture.vocab_size,
            num_layers=architecture.num_hidden_layers,
            num_heads=architecture.num_attention_heads,
            num_kv_heads=architecture.num_key_value_heads,
            embed_dim=architecture.hidden_size,
            intermediate_dim=architecture.intermediate_size,
            max_seq_len=case.max_tokens,
            norm_eps=architecture.rms_norm_eps,
            rope_base=architecture.rope_theta,
            tie_word_embeddings=True,
            lora_rank=case.lora.rank,
            lora_alpha=case.lora.alpha,
        )
    weights = BaseWeights(paths.checkpoint)
    base = qwen2_hf_to_tune(dict(weights.read(weights.names, device)), tie_word_embeddings=True)
    # For Qwen2 our names are torchtune's.
    stored = read_adapter(paths.adapter)
    names = adapter_names(architecture, stored.lora.targets)
    adapter = {ours: stored.tensors[theirs] for ours, theirs in names.items()}
    model.load_state_dict({**base, **adapter}, strict=True)
    set_trainable_params(model, get_adapter_params(model))
    training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    model.set_num_output_chunks(_OUTPUT_CHUNKS)

    def read(batch: MicroBatch) -> Tensor:
        # All positions are projected, as in its recipe; the response's are picked from each chunk.
        chunks_BSV = model(batch.tokens_BS)
        width = chunks_BSV[0].shape[1]
        found = torch.empty(0, device=device)
        order = []
        for number, chunk_BSV in enumerate(chunks_BSV):
            rows = batch.rows_N % batch.tokens_BS.shape[1]
            inside = (rows // width == number).nonzero()[:, 0]
            samples = batch.rows_N[inside] // batch.tokens_BS.shape[1]
            logprobs = batch.logprobs(chunk_BSV[samples, rows[inside] - number * width], inside)
            found = torch.cat([found, logprobs])
            order.append(inside)
        return found[torch.cat(order).argsort()]

    return _plain_step(read, lambda: disable_adapter(model), model, case, recipe, paths.samples(), fused=True)


CONTENDERS: dict[str, Callable[[Paths, Case, Train], Step]] = {
    "clawloop": our_step,
    "clawloop, not sharing": partial(our_step, share_prefixes=False),
    "clawloop, by transformers": partial(our_step, share_prefixes=False, backend="transformers"),
    **{f"clawloop, {hints} hints": partial(our_step, hints=hints) for hints in range(MOST_HINTS + 1)},
    "peft": peft_step,
    "torchtune": torchtune_step,
}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B samples padded on the right to S tokens, with N response tokens among them.

    Args:
        tokens_BS: int64; padding is never read.
        rows_N: index in B·S whose hidden state predicts a response token.
        targets_N: that token.
        temperature_N, behaviour_N, advantage_N: of each response token.
    """

    tokens_BS: Tensor
    rows_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor

    @classmethod
    def of(cls, samples: Sequence[BatchSample], device: torch.device) -> MicroBatch:
        width = max(plain_sequence(sample).input_tokens for sample in samples)
        tokens = torch.zeros(len(samples), width, dtype=torch.int64)
        rows: list[int] = []
        temperatures: list[float] = []
        advantages: list[float] = []
        for index, sample in enumerate(samples):
            ids = [*sample.prompt_ids, *sample.response_ids[:-1]]
            tokens[index, : len(ids)] = torch.tensor(ids)
            first = index * width + len(sample.prompt_ids) - 1
            rows.extend(range(first, first + len(sample.response_ids)))
            temperatures.extend([sample.temperature] * len(sample.response_ids))
            advantages.extend([sample.reward or 0.0] * len(sample.response_ids))
        return cls(
            tokens.to(device),
            torch.tensor(rows, device=device),
            torch.tensor([token for sample in samples for token in sample.response_ids], device=device),
            torch.tensor(temperatures, device=device),
            torch.tensor([logprob for sample in samples for logprob in sample.logprobs], device=device),
            torch.tensor(advantages, device=device),
        )

    def logprobs(self, logits_NV: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Log-probs of the target tokens, from the logits of all response tokens or of the chosen ones."""
        temperature_N = self.temperature_N if chosen is None else self.temperature_N[chosen]
        targets_N = self.targets_N if chosen is None else self.targets_N[chosen]
        scaled_NV = logits_NV.float() / temperature_N[:, None]
        return scaled_NV.gather(-1, targets_N[:, None])[:, 0] - scaled_NV.logsumexp(-1)


def _plain_step(
    read: Read,
    without_adapter: Callable[[], AbstractContextManager[None]],
    model: nn.Module,
    case: Case,
    recipe: Train,
    samples: Sequence[BatchSample],
    *,
    fused: bool = False,
) -> Step:
    device = torch.device(case.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=recipe.optimiser.lr,
        betas=(recipe.optimiser.beta1, recipe.optimiser.beta2),
        weight_decay=recipe.optimiser.weight_decay,
        fused=fused,
    )
    by_length = sorted(samples, key=lambda sample: -plain_sequence(sample).input_tokens)
    at_once = case.samples_at_once
    groups = [by_length[first : first + at_once] for first in range(0, len(by_length), at_once)]
    total = sum(len(sample.response_ids) for sample in samples)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        running = torch.zeros((), device=device)
        for group in groups:
            batch = MicroBatch.of(group, device)
            with torch.no_grad(), without_adapter():
                base_N = read(batch)
            loss = _loss(read(batch), base_N, batch, recipe) / total
            loss.backward()  # type: ignore[no-untyped-call]
            running += loss.detach()
        clip_grad_norm_(trained, recipe.optimiser.grad_clip)
        optimizer.step()
        return float(running)

    return step


def _loss(logprob_N: Tensor, base_N: Tensor, batch: MicroBatch, recipe: Train) -> Tensor:
    """PPO clip with dual clip, and weighted k2: as our recipe's `loss`, written out; summed."""
    weights, advantage_N = recipe.loss, batch.advantage_N
    ratio_N = (logprob_N - batch.behaviour_N).exp()
    clipped_N = ratio_N.clamp(1 - weights.clip_low, 1 + weights.clip_high)
    objective_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    dual_N = torch.maximum(objective_N, weights.dual_clip * advantage_N)
    objective_N = torch.where(advantage_N < 0, dual_N, objective_N)
    distance_N = base_N - logprob_N
    return (weights.kl * ratio_N.detach().clamp(0, 2) * distance_N.square() / 2 - objective_N).sum()


def main() -> None:
    name, folder = sys.argv[1:]
    paths = Paths(Path(folder))
    case = paths.case()
    torch.set_num_threads(case.threads)
    step = CONTENDERS[name](paths, case, load_recipe(_RECIPES / "binary.toml").train)
    _answer({"loaded_bytes": reset_peak_memory(case)})
    for line in sys.stdin:
        _answer(_profiled(step) if line.strip() == "profile" else timed(step, case))


def timed(step: Step, case: Case) -> dict[str, float]:
    _wait_for_device(case)
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    _wait_for_device(case)
    seconds = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"loss": loss, "peak_bytes": _peak_bytes(case), **seconds}


def _profiled(step: Step) -> dict[str, float | str]:
    """Profile a step; return the time by operator and the peak of CPU tensors, beyond those allocated before."""
    with profile(profile_memory=True) as found:
        step()
    sort = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: float(event["ts"]))
    before = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    tensor_bytes = max(event["args"]["Total Allocated"] for event in changes) - before
    return {"tensor_bytes": tensor_bytes, "table": found.key_averages().table(sort_by=sort, row_limit=25)}


def _answer(content: Mapping[str, float | str]) -> None:
    print(json.dumps(content), flush=True)


def _wait_for_device(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def reset_peak_memory(case: Case) -> int:
    """Release the memory of loading and return the bytes in use."""
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    return _from_status("VmRSS")


def _peak_bytes(case: Case) -> int:
    return torch.cuda.max_memory_allocated() if case.device == "cuda" else _from_status("VmHWM")


def _from_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
