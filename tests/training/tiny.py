"""Tiny random decoders from transformers; norms look trained, so that their order with RoPE shows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from clawloop.core.contracts.training import BatchSample
from clawloop.core.ids import SampleId
from clawloop.training.model.port import PolicyModel
from clawloop.training.packing import TokenSequence, collate

VOCAB = 199
Family = Literal["qwen2", "qwen3", "llama", "mistral"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Llama 3.1's, for a context of 64 tokens: of six frequencies some stay, some are slower, one is between."""


def save_checkpoint(
    path: Path,
    family: Family = "qwen3",
    *,
    tied: bool = True,
    shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vocab: int = VOCAB,
    positions: int = 256,
    **further: Any,
) -> Path:
    """A checkpoint of about 100,000 parameters, as transformers writes it.

    Args:
        further: of its config.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        **({"head_dim": 16} if family == "qwen3" else {}),
        **({"sliding_window": None} if family == "mistral" else {}),
        **further,
    }
    name = family.capitalize()
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.5 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(5)
    model.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    return path


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same checkpoint in transformers."""
    [architecture] = json.loads((path / "config.json").read_text())["architectures"]
    found: PreTrainedModel = getattr(transformers, architecture).from_pretrained(path, dtype=dtype)
    return found.eval()


def random_sequences(lengths: list[tuple[int, int]], seed: int = 1) -> list[TokenSequence]:
    """Sequences of (prompt, response) lengths, with temperatures from 0.6 up."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index, (prompt, response) in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist()
        sequences.append(TokenSequence(f"s{index}", ids[:prompt], ids[prompt:], 0.6 + 0.1 * index))
    return sequences


def shake_adapter(model: PolicyModel, size: float = 0.1) -> None:
    """Random A and B, so that the adapter does something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.adapter_parameters().values():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of gradients, all tensors as one vector: a single tensor's gradient may be only noise."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return math.sqrt(off / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


def all_logits(model: PolicyModel, ids: list[int]) -> Tensor:
    """Logits at every position of one document."""
    packed = collate([TokenSequence("all", ids, [0], 1.0)], [0])
    with torch.no_grad():
        return model.logits(model.hidden_states(packed))


def random_ids(count: int) -> list[int]:
    """The same token ids at every call."""
    ids: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return ids


def sample_id(number: int) -> SampleId:
    return SampleId(UUID(int=number))


def as_samples(
    model: PolicyModel,
    sequences: Sequence[TokenSequence],
    *,
    hinted: Sequence[Sequence[int] | None] | None = None,
    version: int = 1,
    seed: int = 12,
) -> list[BatchSample]:
    """Samples of these sequences: recorded log-probs near the model's, every third verdict negative."""
    generator = torch.Generator().manual_seed(seed)
    packed = collate(sequences, range(len(sequences)))
    with torch.no_grad():
        logprobs_of = packed.split(model(packed).logprobs_N)
    samples = []
    for index, sequence in enumerate(sequences):
        logprobs = logprobs_of[index]
        with_hint = None if hinted is None else hinted[index]
        noise = 0.15 * torch.randn(logprobs.shape, generator=generator)
        samples.append(
            BatchSample(
                sample_id=sample_id(index),
                prompt_ids=sequence.prompt_ids,
                response_ids=sequence.response_ids,
                logprobs=(logprobs + noise).clamp(max=0).tolist(),
                temperature=sequence.temperature,
                version=version,
                reward=1.0 if index % 3 else -1.0,
                hinted_prompts={} if with_hint is None else {0: with_hint},
            )
        )
    return samples


def random_batch(model: PolicyModel, *, hints: bool = False, version: int = 1, seed: int = 11) -> list[BatchSample]:
    """Nine samples of unequal length; every other one has a hint."""
    shapes = [(5, 1), (12, 9), (30, 14), (3, 22), (8, 6), (17, 3), (40, 11), (2, 2), (9, 17)]
    sequences = random_sequences(shapes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 2)
    hinted = [
        [*sequence.prompt_ids, *torch.randint(0, VOCAB, (7,), generator=generator).tolist()]
        if hints and index % 2
        else None
        for index, sequence in enumerate(sequences)
    ]
    return as_samples(model, sequences, hinted=hinted, version=version, seed=seed + 1)


def session_batch(model: PolicyModel, *, version: int = 1, seed: int = 5) -> list[BatchSample]:
    """Eight samples in the shape of a session and of a group: long beginnings in common, none a continuation.

    Five turns, each with a volatile end to its prompt; three responses to one prompt. Each has a hint.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        return found

    lasting, sequences, hinted = ids(40), [], []
    for turn in range(5):
        lasting = [*lasting, *ids(12)]
        volatile = ids(6)
        sequences.append(TokenSequence(f"turn {turn}", [*lasting, *volatile], ids(9), 0.7))
        hinted.append([*lasting, *ids(5), *volatile])
    prompt = ids(50)
    for member in range(3):
        sequences.append(TokenSequence(f"member {member}", prompt, ids(4 + member), 1.0))
        hinted.append([*prompt, *ids(5)])
    return as_samples(model, sequences, hinted=hinted, version=version, seed=seed + 1)
