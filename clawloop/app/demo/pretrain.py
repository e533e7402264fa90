"""Pretrains the demo model: a small Qwen3 that answers, judges and writes hints.

The same seed, machine and thread count give the same weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
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
_BATCH_LESSONS = 8
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


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tokenized lesson.

    Args:
        replies: (begin, end) of each reply to learn, with its end-of-turn token.
        weights: loss weight of each token of each reply.
    """

    tokens: Sequence[int]
    replies: Sequence[tuple[int, int]]
    weights: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons side by side, each without its last token, which is only a target.

    Args:
        tokens_BT: input tokens; shorter lessons are filled up at the end, which no token before attends to.
        lessons_N, places_N: where each reply token is predicted; targets_N: these tokens.
        weights_N: loss weights.
    """

    tokens_BT: Tensor
    lessons_N: Tensor
    places_N: Tensor
    targets_N: Tensor
    weights_N: Tensor


def batched(lessons: Sequence[Encoded]) -> Batch:
    """
    Raises:
        ValueError: a reply has fewer or more weights than tokens.
    """
    rows: list[int] = []
    places: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    inputs = [list(lesson.tokens[: lesson.replies[-1][1] - 1]) for lesson in lessons]
    for row, lesson in enumerate(lessons):
        for (begin, end), of_reply in zip(lesson.replies, lesson.weights, strict=True):
            if len(of_reply) != end - begin:
                raise ValueError(f"a reply of {end - begin} tokens has {len(of_reply)} weights")
            rows += [row] * (end - begin)
            places += range(begin - 1, end - 1)
            targets += lesson.tokens[begin:end]
            weights += of_reply
    width = max(map(len, inputs))
    return Batch(
        torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in inputs]),
        torch.tensor(rows),
        torch.tensor(places),
        torch.tensor(targets),
        torch.tensor(weights),
    )


def pretrain(folder: Path, plan: Plan, report: Callable[[Progress], None]) -> None:
    """Train the model and write its files to an existing folder."""
    torch.manual_seed(plan.seed)
    lessons = _flat(Lessons(plan.seed))
    chats = [as_text(each.messages) + each.reply for each in islice(lessons, _VOCABULARY_LESSONS)]
    tokenizer = train_vocabulary(chats, Lessons(f"{plan.seed} typed").phrases(_VOCABULARY_PHRASES))
    write_vocabulary(tokenizer, folder)
    encoded = (encode(lesson, tokenizer) for lesson in lessons)
    fit(folder, tokenizer, encoded, plan, report)


def fit(
    folder: Path, tokenizer: Tokenizer, lessons: Iterator[Encoded], plan: Plan, report: Callable[[Progress], None]
) -> None:
    """Train a new model on lessons and write its weights and settings beside its vocabulary."""
    model = _new_model(plan, tokenizer)
    _train(model, tokenizer, lessons, plan, report)
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
    lessons: Iterator[Encoded],
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
    for step in range(1, plan.steps + 1):
        of_step = sorted(islice(lessons, plan.lessons), key=lambda lesson: len(lesson.tokens))
        # Lessons of like length side by side: a judge's prompt is ten times as long as a chat.
        batches = [batched(of_step[at : at + _BATCH_LESSONS]) for at in range(0, len(of_step), _BATCH_LESSONS)]
        joint_VH = embedding_VH + shared_FH[families_V]
        weight = sum(float(batch.weights_N.sum()) for batch in batches)
        loss = torch.stack([_loss(model, joint_VH, batch) for batch in batches]).sum() / weight
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * _lr_factor(step, plan.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += sum(lesson.replies[-1][1] - 1 for lesson in of_step)
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


def _loss(model: Qwen3ForCausalLM, embedding_VH: Tensor, batch: Batch) -> Tensor:
    states_BTH = model.model(inputs_embeds=F.embedding(batch.tokens_BT, embedding_VH)).last_hidden_state
    logits_NV = F.linear(states_BTH[batch.lessons_N, batch.places_N], embedding_VH)
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
