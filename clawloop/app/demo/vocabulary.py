"""Trains the demo model's tokenizer: byte-level BPE over the lessons.

Three differences from Qwen's keep prompts short enough for a small model on a CPU: each fixed line of the judge prompts
is one token; a prompt's mark is three tokens of two digits, which a model of four layers can copy; and the words of
feedback take precedence over rarer letter pairs of the chats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from uuid import UUID

from tokenizers import Tokenizer

from clawloop.app.demo.examples import LEARNED_FORMS
from clawloop.app.local import tiny_model
from clawloop.core.contracts.turns import Message
from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import gather
from clawloop.core.judging.prompts import hint_prompt, vote_prompt

PAD, START, END = tiny_model.CONTROL_TOKENS
CONTEXT_TOKENS = 8192
VOCABULARY = 5120
_MARK_END = r"(?![0-9A-Za-z])"
_DIGITS = (
    rf" (?=[0-9a-f]{{6}}{_MARK_END})|(?<= )[0-9a-f]{{2}}(?=[0-9a-f]{{4}}{_MARK_END})"
    rf"|(?<= [0-9a-f]{{2}})[0-9a-f]{{2}}(?=[0-9a-f]{{2}}{_MARK_END})|(?<= [0-9a-f]{{4}})[0-9a-f]{{2}}{_MARK_END}"
)
_CAPITALS_EVERY = 4
_PAIR_COPIES = 3000  # enough to make every pair of digits a token before rarer words


def train_vocabulary(chats: Iterable[str], typed: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on chats and on typed phrases.

    The words of typed phrases become fixed tokens: as they stand, alone on a line, and in capitals.
    """
    fixed = [*tiny_model.MARKUP_TOKENS, *fixed_lines()]
    texts = chain(_with_pairs(chats, fixed), _with_words(typed))
    return tiny_model.train_tokenizer(texts, VOCABULARY, fixed, f"{_DIGITS}|{tiny_model.WORDS}")


def fixed_lines() -> tuple[str, ...]:
    """Return the fixed lines of the judge prompts, without line ends."""
    evidence = gather([], {"role": "assistant", "content": "x"}, [])
    lines: dict[str, None] = {}
    for ask in (vote_prompt, hint_prompt):
        for form in LEARNED_FORMS:
            prompt = ask(TurnId(UUID(int=0)), evidence, form)
            instruction, question = (str(message["content"]) for message in prompt.messages)
            asked = question.rpartition("\n")[2]
            parts = [*instruction.split("\n"), *asked.split(f" {prompt.mark}")]
            lines |= dict.fromkeys(part for part in parts if len(part) > len(prompt.mark))
    return tuple(lines)


def families(tokenizer: Tokenizer) -> list[int]:
    """Return each token's family: tokens that differ only in case and in a leading space share a number."""
    numbers: dict[str, int] = {}
    result = []
    for at in range(tokenizer.get_vocab_size()):
        token = str(tokenizer.id_to_token(at))
        form = token.removeprefix("Ġ").lower() if token.removeprefix("Ġ").isascii() else token
        result.append(numbers.setdefault(form or token, len(numbers)))
    return result


def write_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files and the chat template in Hugging Face's format."""
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(Path(tiny_model.__file__).with_name("chat_template.jinja"), folder / "chat_template.jinja")
    config = {
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": CONTEXT_TOKENS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def as_text(messages: Iterable[Message]) -> str:
    """Return a chat with the generation prompt, as the chat template renders it."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages) + f"{START}assistant\n"


def _with_pairs(texts: Iterable[str], fixed: list[str]) -> Iterator[str]:
    for text in texts:
        for line in fixed:
            text = text.replace(line, "\n")  # fixed lines are tokens already
        yield text
    for pair in range(256):
        yield f" {pair:02x}{pair:02x}{pair:02x}" * _PAIR_COPIES


def _with_words(typed: Iterable[str]) -> Iterator[str]:
    for at, text in enumerate(typed):
        lines = "\n".join(text.split())
        yield f"{text}\n{lines}"
        if at % _CAPITALS_EVERY == 0:
            yield f"{text}\n{lines}".upper()
