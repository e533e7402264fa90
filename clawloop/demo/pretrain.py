"""Making the demo model: a small Qwen3, from random weights to one that answers, judges and writes hints.

Knows nothing about terminals. The same seed, machine and thread count give the same weights.
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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from clawloop.contracts import Message
from clawloop.demo.examples import Lesson, Lessons
from clawloop.demo.packing import Encoded, Pack, attend_within_lessons, pack
from clawloop.demo.vocabulary import CONTEXT_TOKENS, END, PAD, START, as_text, train_vocabulary, write_vocabulary

_ATTENTION = "clawloop_within_lessons"
_VOCABULARY_LESSONS = 6000
_CLIP = 1.0
# An answer has many tokens that are soon known by heart, a vote has one that is not. The weight is the same for each
# token of a chat: were it smaller in longer replies, the model would come to prefer the shorter style.
_CHAT_WEIGHT = 0.3
_CHATS = ("answer", "hinted", "reaction")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model is made.

    Args:
        lessons: in each step's batch.
        lr: the peak; a short rise to it, then a cosine down to nearly 0.
    """

    seed: int = 0
    steps: int = 2200
    lessons: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.05
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256


@dataclass(frozen=True, slots=True)
class Progress:
    """Where pretraining is.

    Args:
        loss: nats per weighted token, smoothed.
        tokens: read so far.
    """

    step: int
    steps: int
    loss: float
    tokens: int


def pretrain(folder: Path, plan: Plan, report: Callable[[Progress], None], *, start: Path | None = None) -> None:
    """Make the model and write its files into an existing folder.

    Args:
        start: go on from this model instead of random weights, with its vocabulary.
    """
    torch.manual_seed(plan.seed)
    lessons = _flat(Lessons(plan.seed))
    if start is None:
        vocabulary = [as_text(each.messages) + each.reply for each in islice(lessons, _VOCABULARY_LESSONS)]
        tokenizer = train_vocabulary(vocabulary)
        model = _new_model(plan, tokenizer)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        model = _new_model(plan, tokenizer)
        model.load_state_dict(load_file(start / "model.safetensors"), strict=False)  # lm_head is the embedding
    _train(model, _packs(lessons, tokenizer, plan.lessons), plan, report)
    write_vocabulary(tokenizer, folder)
    _write_model(model, folder)


def encode(lesson: Lesson, tokenizer: Tokenizer) -> Encoded:
    """A lesson as ids. Of a chat all replies are learned, of a question to the judge the answer."""
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
    return Encoded(tokens, replies, _CHAT_WEIGHT if lesson.kind in _CHATS else 1.0)


def _id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None
    return found


def _flat(lessons: Lessons) -> Iterator[Lesson]:
    for together in lessons:
        yield from together


def _packs(lessons: Iterator[Lesson], tokenizer: Tokenizer, size: int) -> Iterator[Pack]:
    while True:
        yield pack([encode(lesson, tokenizer) for lesson in islice(lessons, size)])


def _new_model(plan: Plan, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    AttentionInterface.register(_ATTENTION, attend_within_lessons)
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
        attn_implementation=_ATTENTION,
    )
    return Qwen3ForCausalLM(config)


def _train(model: Qwen3ForCausalLM, packs: Iterator[Pack], plan: Plan, report: Callable[[Progress], None]) -> None:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98), fused=True)
    model.train()
    smoothed, tokens = math.nan, 0
    for step, batch in zip(range(1, plan.steps + 1), packs, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * _share_of_lr(step, plan.steps)
        loss = _loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        tokens += len(batch.tokens_S)
        smoothed = loss.item() if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * loss.item()
        report(Progress(step, plan.steps, smoothed, tokens))


def _loss(model: Qwen3ForCausalLM, batch: Pack) -> Tensor:
    states: Tensor = model.model(
        input_ids=batch.tokens_S[None],
        position_ids=batch.positions_S[None],
        attention_mask={"full_attention": None},  # the attention function needs none
        use_cache=False,
        lengths=batch.lengths,
    ).last_hidden_state[0]
    logits_NV = model.lm_head(states[batch.rows_N])
    return (F.cross_entropy(logits_NV, batch.targets_N, reduction="none") * batch.weights_N).sum()


def _share_of_lr(step: int, steps: int) -> float:
    rise = min(1.0, step / 50)
    return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def _write_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    # Stored in half the bytes, read as float32: what is lost is far below what sampling at any temperature shows.
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # the embedding again
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    config = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    _write_json(folder / "config.json", config)
    ends = [model.config.eos_token_id, model.config.pad_token_id]
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, "eos_token_id": ends})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
