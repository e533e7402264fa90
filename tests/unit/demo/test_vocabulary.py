"""The demo model's tokenizer: typed words are whole tokens, and spellings of a word share a family."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.demo.vocabulary import families


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHAT_MODEL / "tokenizer.json"))


@pytest.mark.parametrize("text", ["thanks", "thx", "terrible", "THANKS", "danke", "perfect", "python"])
def test_words_of_feedback_are_one_token(tokenizer: Tokenizer, text: str) -> None:
    assert len(tokenizer.encode(text).ids) == 1


def test_tokens_that_differ_in_case_or_a_space_are_one_family(tokenizer: Tokenizer) -> None:
    numbers = families(tokenizer)
    vocabulary = tokenizer.get_vocab()
    assert len({numbers[vocabulary[token]] for token in ("thanks", "Thanks", "THANKS", "Ġthanks", "ĠTHANKS")}) == 1
    assert len({numbers[vocabulary[token]] for token in ("thanks", "thx", "perfect", "Ġ", "Ċ", "3f")}) == 6
    assert len(numbers) == tokenizer.get_vocab_size()
    assert set(numbers) == set(range(max(numbers) + 1))
