"""Writes and reads the input of one comparison of training steps: checkpoint, adapter and batch.

Weights and tokens are random: a step's cost does not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias
from uuid import UUID

import torch
import transformers

from clawloop.core.contracts.training import BatchSample
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import CONTROL
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, write_version
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors
from clawloop.training.packing import Limits, TokenSequence, collate, plan_micro_batches

Family = Literal["qwen3", "qwen2", "llama"]
Ids: TypeAlias = tuple[list[int], list[int]]
"""Prompt and response."""
# Shares of `tokens` in a session's turn: the block that later requests drop, and a hint.
_BLOCK, _HINT = 0.06, 0.06
# A sentence with what leads in, a control, and the template's end of the message that they stand in.
HINT_TOKENS, CONTROL_TOKENS, HINT_AT = 24, 12, 4
# Large enough for the adapter, the ratio and the KL to matter; small enough that nothing diverges.
_ADAPTER_SIZE = 0.02
_LOGPROB_NOISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's shape, in the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def parameters_read_per_token(self) -> int:
        """Number of weights a token is multiplied with, without the output projection."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Args:
        family: qwen3, llama, or qwen2 for Qwen2.5.
        dtype: of weights and arithmetic.
        device: `cpu` or `cuda`.
        rank: of LoRA.
        samples_at_once: samples in one micro-batch of a contender that pads; one that packs gets as
            many tokens per micro-batch as the longest of these has.
        threads: of torch on the CPU.
        max_tokens: of the longest sample.
    """

    family: Family
    shape: Shape
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    rank: int
    samples_at_once: int
    threads: int
    max_tokens: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def lora(self) -> LoraShape:
        return LoraShape(rank=self.rank, alpha=2.0 * self.rank)

    @property
    def limits(self) -> Limits:
        """The limits of a contender that packs."""
        return Limits(
            budget_tokens=self.samples_at_once * self.max_tokens,
            max_tokens=self.max_tokens,
            vocab_size=self.shape.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of a case."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def adapter(self) -> Path:
        (found,) = (self.folder / "versions").glob("v1-*")
        return found

    def case(self) -> Case:
        content = json.loads((self.folder / "case.json").read_text())
        return Case(**{**content, "shape": Shape(**content["shape"])})

    def samples(self) -> list[BatchSample]:
        stored = json.loads((self.folder / "samples.json").read_text())
        return [BatchSample(**{**sample, "sample_id": SampleId(UUID(sample["sample_id"]))}) for sample in stored]


def unrelated_samples(count: int, tokens: int, vocab: int) -> list[Ids]:
    """Samples that share no prefix: totals within a quarter of `tokens`, a quarter to a half of it response."""
    random = Random(0)
    found = []
    for _ in range(count):
        total = random.randint(tokens * 3 // 4, tokens * 5 // 4)
        response = random.randint(total // 4, total // 2)
        ids = random.choices(range(vocab), k=total)
        found.append((ids[:-response], ids[-response:]))
    return found


def session_samples(turns: int, tokens: int, vocab: int) -> list[Ids]:
    """The turns of one session as OpenClaw sends it; a sample has about twice `tokens`.

    Each prompt is the whole history, the user's message, and a block that later requests drop; each reply begins with
    reasoning, of which the history keeps only the answer. The system prompt is as long as three turns; OpenClaw's, with
    24,000 characters and twelve tools, is longer, which leaves more to share.
    """
    random = Random(0)

    def ids(share: float) -> list[int]:
        return random.choices(range(vocab), k=round(share * tokens))

    history, found = ids(0.8), []
    for _ in range(turns):
        history += ids(0.04)
        answer = ids(0.08)
        found.append(([*history, *ids(_BLOCK)], [*ids(0.12), *answer]))
        history += answer
    return found


def hinted_prompts(session: Sequence[Ids], tokens: int, vocab: int) -> list[list[int]]:
    """The prompts of `session_samples`, each with a hint after the user's message, before the dropped block."""
    random = Random(1)
    block, hint = round(_BLOCK * tokens), round(_HINT * tokens)
    found = []
    for prompt, _ in session:
        place = len(prompt) - block
        found.append([*prompt[:place], *random.choices(range(vocab), k=hint), *prompt[place:]])
    return found


def with_hints(samples: Sequence[BatchSample], hints: int, case: Case) -> list[BatchSample]:
    """The samples, each with so many hinted prompts and that of a control, a few tokens before the prompt's end."""
    random = Random(2)

    def hinted(prompt: Sequence[int], tokens: int) -> list[int]:
        return [*prompt[:-HINT_AT], *random.choices(range(case.shape.vocab_size), k=tokens), *prompt[-HINT_AT:]]

    lengths = dict.fromkeys(range(hints), HINT_TOKENS) | ({CONTROL: CONTROL_TOKENS} if hints else {})
    return [
        replace(each, hinted_prompts={place: hinted(each.prompt_ids, tokens) for place, tokens in lengths.items()})
        for each in samples
    ]


def write_case(folder: Path, case: Case, ids: Sequence[Ids], *, checkpoint: Path | None = None) -> None:
    """Write a case's files.

    Args:
        folder: is created.
        ids: prompt and response of each sample.
        checkpoint: of another case with the same model, which is linked; None: a new one.
    """
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    paths = Paths(folder)
    if checkpoint is None:
        _write_checkpoint(paths.checkpoint, case)
    else:
        paths.checkpoint.symlink_to(checkpoint, target_is_directory=True)
    model = load_model(
        paths.checkpoint,
        case.lora,
        dtype=case.torch_dtype,
        device=torch.device(case.device),
        max_tokens=case.max_tokens,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.adapter_parameters().values():
            parameter.copy_(_ADAPTER_SIZE * torch.randn(parameter.shape, generator=generator))
    identity = BaseIdentity(name="random", fingerprint=BaseWeights(paths.checkpoint).fingerprint())
    files = adapter_files(Adapter(case.lora, adapter_tensors(model), identity))
    write_version(folder / "versions", 1, files)
    samples = _samples(model, case, ids, generator)
    (folder / "samples.json").write_text(json.dumps([asdict(sample) for sample in samples], default=str))


def _write_checkpoint(path: Path, case: Case) -> None:
    torch.manual_seed(0)
    shared = {"max_position_embeddings": case.max_tokens, "tie_word_embeddings": True, "rope_theta": 10000.0}
    shape = asdict(case.shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.torch_dtype)
    try:
        with torch.device(case.device):
            name = case.family.capitalize()
            config = getattr(transformers, f"{name}Config")(**shape, **shared)
            getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _samples(model: PolicyModel, case: Case, ids: Sequence[Ids], generator: torch.Generator) -> list[BatchSample]:
    sequences = [
        TokenSequence(str(index), prompt, response, 0.6 + 0.1 * (index % 5))
        for index, (prompt, response) in enumerate(ids)
    ]
    samples = {}
    for members in plan_micro_batches(sequences, case.limits):
        packed = collate(sequences, members).to(model.device)
        for member, logprobs in packed.split(model(packed).logprobs_N.float().cpu()).items():
            noise = _LOGPROB_NOISE * torch.randn(logprobs.shape, generator=generator)
            sequence = sequences[member]
            samples[member] = BatchSample(
                sample_id=SampleId(UUID(int=member)),
                prompt_ids=sequence.prompt_ids,
                response_ids=sequence.response_ids,
                logprobs=(logprobs + noise).clamp(max=0).tolist(),
                temperature=sequence.temperature,
                version=1,
                reward=1.0 if member % 3 else -1.0,
            )
    return [samples[index] for index in range(len(ids))]
