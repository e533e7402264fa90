"""The shipped tool-call model matches its card, its lessons and its environment."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from clawloop.demo.card import CARD, digest
from clawloop.demo.tool_calls.attempts import ToolCallModel
from clawloop.demo.tool_calls.lessons import conversation, conversations
from clawloop.demo.tool_calls.location import model_path
from clawloop.demo.tool_calls.pretrain import segments, tool_list
from clawloop.demo.tool_calls.recipe import tool_call_recipe
from clawloop.environments.task import Split, split_of
from clawloop.environments.tool_call.environment import Question, question
from clawloop.local.checks import require_model
from clawloop.recipes.checks import require_rank

MEGABYTES = 4.0


@pytest.fixture(scope="module")
def model() -> ToolCallModel:
    return ToolCallModel(model_path())


def test_the_card_describes_these_weights() -> None:
    assert f"`{digest(model_path())}`" in (model_path() / CARD).read_text()


def test_it_is_small_and_engines_can_load_it_and_its_adapters() -> None:
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= MEGABYTES * 1e6
    require_model(model_path())
    require_rank(tool_call_recipe(), 16)


def test_lessons_are_written_as_its_chat_template_writes_them(model: ToolCallModel) -> None:
    """Engines render prompts by the template: what the model learned must read the same, token for token."""
    for messages in islice(conversations(1), 50):
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        pieces = segments(messages)[:-2]  # without the last reply
        written = [i for text, _ in pieces for i in model.tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert written == model.prompt_ids(messages[:last])


def test_the_environments_tools_are_one_token(model: ToolCallModel) -> None:
    """After a change to them the model has to be made anew."""
    assert len(model.tokenizer(tool_list(), add_special_tokens=False)["input_ids"]) == 1


def test_no_held_out_task_is_in_a_lesson() -> None:
    asked = {str(messages[0]["content"]) for messages in islice(conversations(0), 300)}
    assert {split_of(text) for text in asked} == {Split.TRAIN}


def test_a_third_of_the_scripts_is_right() -> None:
    rng = random.Random(0)
    right = 0
    for number in range(500):
        asked = question(Split.TRAIN, number)
        right += str(conversation(asked, rng)[-1]["content"]) == f"It is {asked.answer}."
    assert 0.25 < right / 500 < 0.45


def test_it_solves_some_tasks_and_not_others(model: ToolCallModel) -> None:
    torch.manual_seed(0)
    success = model.success([question(Split.TEST, number) for number in range(100)])
    assert 0.15 <= success <= 0.55


def test_an_attempt_ends_with_a_reply_that_calls_nothing(model: ToolCallModel) -> None:
    torch.manual_seed(0)
    attempts = model.attempts([Question(37, "*", 58)] * 30)
    assert {len(attempt.turns) for attempt in attempts} >= {1, 2}
    for attempt in attempts:
        assert attempt.reward in (0.0, 1.0)
        assert [message["role"] for message in attempt.messages] == [
            "user",
            *["assistant", "tool"] * (len(attempt.turns) - 1),
        ]
        for turn in attempt.turns:
            assert len(turn.response_ids) == len(turn.logprobs)
            assert all(logprob <= 0 for logprob in turn.logprobs)
