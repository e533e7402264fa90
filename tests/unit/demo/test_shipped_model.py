"""The shipped model matches its card and does what the demo needs."""

from __future__ import annotations

import re

import pytest
import torch

from clawloop.app.demo.card import CARD, digest
from clawloop.app.demo.evaluate import measure_answers, measure_judge, measured_lists
from clawloop.app.demo.local_model import LocalModel
from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.demo.vocabulary import CONTEXT_TOKENS, as_text, fixed_lines
from clawloop.app.local.checks import require_model
from clawloop.core.contracts.turns import Message
from clawloop.core.judging.prompts import AnswerForm
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape

MEGABYTES = 4.0
VOTES_RIGHT = 0.9  # on each whole list, by the card
# Of the first 200 phrases of a list, which a test takes: a few wrong ones more or less.
VOTES_RIGHT_OF_SOME = 0.88
HINTS_RIGHT = 0.85


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(CHAT_MODEL)


def test_the_card_describes_these_weights() -> None:
    card = (CHAT_MODEL / CARD).read_text()
    assert f"`{digest(CHAT_MODEL)}`" in card


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in CHAT_MODEL.iterdir()) <= MEGABYTES * 1e6


def test_an_engine_can_be_started_on_it_and_the_trainer_reads_it() -> None:
    require_model(CHAT_MODEL)
    policy = load_model(CHAT_MODEL, LoraShape(8, 16.0), dtype=torch.float32, device=torch.device("cpu"))
    assert policy.max_tokens == CONTEXT_TOKENS >= 8192


def test_its_chat_template_takes_every_role(model: LocalModel) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    text = model.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be helpful."},
            {"role": "user", "content": "Explain rain."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "wet"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert "wet" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_its_template_writes_chats_as_its_lessons_do(model: LocalModel) -> None:
    chat: list[Message] = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "x"},
    ]
    written = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert written == as_text(chat)


def test_it_was_made_for_todays_judge_prompts(model: LocalModel) -> None:
    """Each fixed line is one token. If this fails, the prompts have changed: make the model anew."""
    for line in fixed_lines():
        assert len(model.tokenizer(line, add_special_tokens=False)["input_ids"]) == 1, line


def test_a_mark_is_three_tokens_after_its_space(model: LocalModel) -> None:
    ids = model.tokenizer("hint 3fa2bc: x", add_special_tokens=False)["input_ids"]
    assert [model.tokenizer.decode([token]) for token in ids][:6] == ["hint", " ", "3f", "a2", "bc", ":"]


@pytest.mark.slow
def test_it_answers_in_even_styles_and_follows_hints(model: LocalModel) -> None:
    torch.set_num_threads(1)
    figures = measure_answers(model, 0.8, per_axis=40)
    assert figures.exact >= 0.98
    assert figures.hint_followed >= 0.95
    assert all(0.25 < share < 0.75 for share in figures.first_style.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("held-out phrases", marks=pytest.mark.long),
        pytest.param("held-out patterns", marks=pytest.mark.long),
        "our own list",
    ],
)
def test_it_judges_what_it_never_saw(model: LocalModel, name: str) -> None:
    figures = measure_judge(model, measured_lists()[name][:200], AnswerForm.GRAMMAR)
    assert figures.vote >= VOTES_RIGHT_OF_SOME, figures.wrong
    assert figures.unreadable_as_bad <= 0.2
    assert figures.hint >= HINTS_RIGHT


def test_the_card_gives_the_figures_the_demo_needs() -> None:
    card = (CHAT_MODEL / CARD).read_text()
    votes = [
        float(found) for found in re.findall(r"^\| (?:held-out|our own)[^|]*\| \d+ \| ([\d.]+) \|", card, re.MULTILINE)
    ]
    assert len(votes) >= 3
    assert min(votes) >= VOTES_RIGHT
