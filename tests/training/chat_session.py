"""A session as OpenClaw holds it, as training samples: rendered by a chat template, turn by turn.

Each request carries the whole history and ends with a block that the history never keeps; each reply thinks
first, and later requests hold it without its thinking. So no prompt contains an earlier turn's tokens beyond its
last lasting message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from clawloop.core.contracts.turns import Message
from clawloop.core.judging.hints import with_hint
from clawloop.training.packing import TokenSequence
from tests.chats import assistant, system, user
from tests.openclaw_chats import TOOLS

_WORDS = (
    "the",
    "file",
    "notes",
    "apples",
    "meeting",
    "seven",
    "write",
    "please",
    "report",
    "draft",
    "server",
    "garden",
)


def session_turns(
    tokenizer_folder: Path, turns: int, *, seed: int = 0, hints: bool = False, system_words: int = 60
) -> list[tuple[TokenSequence, list[int] | None]]:
    """The turns of one session, each with its hinted prompt; every third turn has none, or all if not asked for."""
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def text(words: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(words))

    def prompt(messages: list[Message]) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        return ids

    encode: Callable[[str], list[int]] = tokenizer.encode
    lasting: list[Message] = [system(f"You are a personal assistant running inside OpenClaw. {text(system_words)}")]
    found: list[tuple[TokenSequence, list[int] | None]] = []
    for turn in range(turns):
        lasting.append(user(f"[Fri 2026-11-20 11:{turn:02d} UTC] {text(8)}"))
        messages = [*lasting, _volatile(f"Active exec sessions: {turn}\n{text(6)}")]
        thinking, answer = text(20), text(12)
        response = encode(f"<think>\n{thinking}\n</think>\n\n{answer}<|im_end|>")
        hinted = with_hint(messages, text(6)) if hints and turn % 3 else None
        sequence = TokenSequence(f"turn {turn}", prompt(messages), response, 0.6)
        found.append((sequence, None if hinted is None else prompt(hinted)))
        lasting.append(assistant(answer))
    return found


def _volatile(text: str) -> Message:
    framed = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{text}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    return {"role": "user", "content": [{"type": "text", "text": framed}]}
