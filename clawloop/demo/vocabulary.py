"""The demo model's tokenizer: byte-level BPE, trained on its lessons.

Knows nothing about weights. Three departures from Qwen's, which keep prompts short enough for a small model on a
CPU: each line of the judge prompts' fixed text is one token, a prompt's mark is three tokens of two digits, which a
model of four layers can copy, and the words of feedback come before rarer pairs of the chats' letters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from uuid import UUID

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawloop.contracts.turns import Message
from clawloop.ids import TurnId
from clawloop.judging.evidence import gather
from clawloop.judging.prompts import AnswerForm, hint_prompt, vote_prompt
from clawloop.local import tiny_model

PAD, START, END = tiny_model.CONTROL_TOKENS
CONTEXT_TOKENS = 8192
VOCABULARY = 5120
_MARK_END = r"(?![0-9A-Za-z])"
_DIGITS = (
    rf" (?=[0-9a-f]{{6}}{_MARK_END})|(?<= )[0-9a-f]{{2}}(?=[0-9a-f]{{4}}{_MARK_END})"
    rf"|(?<= [0-9a-f]{{2}})[0-9a-f]{{2}}(?=[0-9a-f]{{2}}{_MARK_END})|(?<= [0-9a-f]{{4}})[0-9a-f]{{2}}{_MARK_END}"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CAPITALS_EVERY = 4
_PAIR_COPIES = 3000  # so that every pair of digits becomes a token before rarer words do


def train_vocabulary(chats: Iterable[str], typed: Iterable[str]) -> Tokenizer:
    """A tokenizer for chats like these, in which people type phrases like those.

    What is typed gets tokens of its own, not pieces: each word as it stands, alone on a line, and in capitals.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{_DIGITS}|{_WORDS}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    whole = [*tiny_model.MARKUP_TOKENS, *fixed_lines()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(whole),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain(_with_pairs(chats, whole), _with_words(typed)), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    return tokenizer


def fixed_lines() -> tuple[str, ...]:
    """The lines of judge prompts that are always the same, without their line ends."""
    evidence = gather([], {"role": "assistant", "content": "x"}, [])
    lines: dict[str, None] = {}
    for ask in (vote_prompt, hint_prompt):
        for form in AnswerForm:
            prompt = ask(TurnId(UUID(int=0)), evidence, form)
            instruction, question = (str(message["content"]) for message in prompt.messages)
            asked = question.rpartition("\n")[2]
            parts = [*instruction.split("\n"), *asked.split(f" {prompt.mark}")]
            lines |= dict.fromkeys(part for part in parts if len(part) > len(prompt.mark))
    return tuple(lines)


def families(tokenizer: Tokenizer) -> list[int]:
    """Of each token the number of its family: tokens that differ only in case and in a space before them."""
    numbers: dict[str, int] = {}
    found = []
    for at in range(tokenizer.get_vocab_size()):
        token = str(tokenizer.id_to_token(at))
        form = token.removeprefix("Ġ").lower() if token.removeprefix("Ġ").isascii() else token
        found.append(numbers.setdefault(form or token, len(numbers)))
    return found


def write_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's files, with the chat template, as Hugging Face and vLLM read them."""
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
    """A chat up to where the assistant is to speak, as the chat template writes it."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages) + f"{START}assistant\n"


def _with_pairs(texts: Iterable[str], whole: list[str]) -> Iterator[str]:
    for text in texts:
        for line in whole:
            text = text.replace(line, "\n")  # its words need no tokens of their own
        yield text
    for pair in range(256):
        yield f" {pair:02x}{pair:02x}{pair:02x}" * _PAIR_COPIES


def _with_words(typed: Iterable[str]) -> Iterator[str]:
    for at, text in enumerate(typed):
        lines = "\n".join(text.split())
        yield f"{text}\n{lines}"
        if at % _CAPITALS_EVERY == 0:
            yield f"{text}\n{lines}".upper()
