"""Pretrains the demo model: a small Qwen3 that answers, judges and writes hints.

The same seed, machine and thread count give the same weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawloop.app.demo.examples import Lesson, Lessons
from clawloop.app.demo.forward import last_states
from clawloop.app.demo.packing import Encoded, Pack, pack
from clawloop.app.demo.vocabulary import (
    CONTEXT_TOKENS,
    END,
    PAD,
    START,
    as_text,
    families,
    train_vocabulary,
    write_vocabulary,
)
from clawloop.core.contracts.turns import Message

_VOCABULARY_LESSONS = 3000
_VOCABULARY_PHRASES = 30_000
_CLIP = 1.0
_WARM_UP_STEPS = 50
_DECAY_SHARE = 0.4
# The first three tokens of an answer decide its style; the rest is learned quickly. The weights do not depend on the
# length of a reply: smaller weights in longer replies would make the model prefer the shorter style.
_STYLE_TOKENS = 3
_STYLE_WEIGHT = {"answer": 0.3, "hinted": 3.0, "reaction": 1.0}
_CHAT_WEIGHT = 0.3
# A question with the judge's full prompt, relative to a brief one.
_FULL_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the model and the hyperparameters of its training.

    Args:
        lessons: per batch.
        lr: peak learning rate, after a short warm-up; it decays linearly over the last two fifths of the steps.
    """

    seed: int = 0
    steps: int = 1900
    lessons: int = 32
    lr: float = 4e-3
    weight_decay: float = 0.05
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of pretraining.

    Args:
        loss: nats per weighted token, smoothed.
        tokens: input tokens so far.
    """

    step: int
    steps: int
    loss: float
    tokens: int


def pretrain(folder: Path, plan: Plan, report: Callable[[Progress], None]) -> None:
    """Train the model and write its files to an existing folder."""
    torch.manual_seed(plan.seed)
    lessons = _flat(Lessons(plan.seed))
    chats = [as_text(each.messages) + each.reply for each in islice(lessons, _VOCABULARY_LESSONS)]
    tokenizer = train_vocabulary(chats, Lessons(f"{plan.seed} typed").phrases(_VOCABULARY_PHRASES))
    write_vocabulary(tokenizer, folder)
    fit(folder, tokenizer, _packs(lessons, tokenizer, plan.lessons), plan, report)


def fit(
    folder: Path, tokenizer: Tokenizer, packs: Iterator[Pack], plan: Plan, report: Callable[[Progress], None]
) -> None:
    """Train a new model on packed lessons and write its weights and settings beside its vocabulary."""
    model = _new_model(plan, tokenizer)
    _train(model, tokenizer, packs, plan, report)
    _write_model(model, folder)


def encode(lesson: Lesson, tokenizer: Tokenizer) -> Encoded:
    """Tokenize a lesson. All replies of its chat are targets; a judge prompt has only one."""
    end = _id(tokenizer, END)
    tokens: list[int] = []
    replies: list[tuple[int, int]] = []
    reply: Message = {"role": "assistant", "content": lesson.reply}
    for message in [*lesson.messages, reply]:
        tokens += tokenizer.encode(f"{START}{message['role']}\n").ids
        begin = len(tokens)
        tokens += tokenizer.encode(str(message["content"])).ids
        tokens.append(end)
        if message["role"] == "assistant":
            replies.append((begin, len(tokens)))
        tokens += tokenizer.encode("\n").ids
    weights = [_weights(lesson.kind, end - begin, at, len(replies)) for at, (begin, end) in enumerate(replies)]
    return Encoded(tokens, replies, weights)


def _weights(kind: str, length: int, at: int, replies: int) -> list[float]:
    """Return the loss weights of reply `at` of a lesson with `replies` replies."""
    if kind not in _STYLE_WEIGHT:
        return [1.0 if kind.startswith("brief") else _FULL_WEIGHT] * length
    if at < replies - 1:
        return [_CHAT_WEIGHT] * length
    return ([_STYLE_WEIGHT[kind]] * _STYLE_TOKENS + [_CHAT_WEIGHT] * length)[:length]


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def _flat(lessons: Lessons) -> Iterator[Lesson]:
    for group in lessons:
        yield from group


def _packs(lessons: Iterator[Lesson], tokenizer: Tokenizer, size: int) -> Iterator[Pack]:
    while True:
        yield pack([encode(lesson, tokenizer) for lesson in islice(lessons, size)])


def _new_model(plan: Plan, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=_id(tokenizer, END),
        bos_token_id=None,
        pad_token_id=_id(tokenizer, PAD),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Qwen3ForCausalLM(config)


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    packs: Iterator[Pack],
    plan: Plan,
    report: Callable[[Progress], None],
) -> None:
    embedding_VH = model.model.embed_tokens.weight
    families_V = torch.tensor(families(tokenizer))
    # Spellings of a word share an embedding, because rare spellings occur too seldom to learn one of their own.
    shared_FH = nn.Parameter(torch.randn(int(families_V.max()) + 1, plan.hidden) * embedding_VH.std().item())
    with torch.no_grad():
        embedding_VH *= 0.25
    optimizers = _optimizers(model, shared_FH, plan)
    parameters = [*model.parameters(), shared_FH]
    model.train()
    smoothed, tokens = math.nan, 0
    for step, batch in zip(range(1, plan.steps + 1), packs, strict=False):
        loss = _loss(model, embedding_VH + shared_FH[families_V], batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * _lr_factor(step, plan.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += len(batch.tokens_S)
        smoothed = loss.item() if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * loss.item()
        report(Progress(step, plan.steps, smoothed, tokens))
    with torch.no_grad():
        embedding_VH += shared_FH[families_V]


def _optimizers(model: Qwen3ForCausalLM, shared_FH: nn.Parameter, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (after 250 of 600 steps the loss is 0.38, with AdamW 0.97), AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [model.model.embed_tokens.weight, shared_FH], "weight_decay": plan.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98), fused=True),
        torch.optim.Muon(matrices, lr=plan.lr, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
    ]


def _loss(model: Qwen3ForCausalLM, embedding_VH: Tensor, batch: Pack) -> Tensor:
    states_NH = last_states(model, F.embedding(batch.tokens_S, embedding_VH), batch.lengths, batch.rows_N)
    logits_NV = F.linear(states_NH, embedding_VH)
    return (F.cross_entropy(logits_NV, batch.targets_N, reduction="none") * batch.weights_N).sum()


def _lr_factor(step: int, steps: int) -> float:
    return min(1.0, step / _WARM_UP_STEPS, (steps + 1 - step) / (_DECAY_SHARE * steps))


def _write_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    # float16 halves the size; the rounding error is far below the noise of sampling.
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable only by its owner
    config = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    _write_json(folder / "config.json", config)
    ends = [model.config.eos_token_id, model.config.pad_token_id]
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, "eos_token_id": ends})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
