"""Which positions are scored and trained."""

from __future__ import annotations

import pytest

from clawloop.algorithms.masking import ThinkingTokens, predicting_positions, response_mask
from clawloop.errors import StreamsUnusable

OPEN, CLOSE = 90, 91
THINKING = ThinkingTokens(OPEN, CLOSE)


def test_as_many_positions_as_response_tokens_begin_at_the_last_prompt_token() -> None:
    assert list(range(10))[predicting_positions(4, 3)] == [3, 4, 5]


@pytest.mark.parametrize(("prompt", "response"), [(0, 3), (4, 0)])
def test_nothing_to_predict_from_or_to_score_is_refused(prompt: int, response: int) -> None:
    with pytest.raises(StreamsUnusable, match="nothing to score"):
        predicting_positions(prompt, response)


@pytest.mark.parametrize(
    ("ids", "begins", "expected"),
    [
        ([OPEN, 1, CLOSE, 2, 3], False, [False, False, False, True, True]),
        ([1, CLOSE, 2], True, [False, False, True]),
        ([1, 2], False, [True, True]),
        ([1, 2], True, [False, False]),  # cut inside its thinking
        ([1, OPEN, 2, CLOSE, 3], False, [True, False, False, False, True]),
    ],
)
def test_without_train_thinking_only_the_answer_is_trained(
    ids: list[int], begins: bool, expected: list[bool]
) -> None:
    mask_T = response_mask(ids, train_thinking=False, thinking=THINKING, begins_thinking=begins)
    assert mask_T.tolist() == expected
    everything = response_mask(ids, train_thinking=True, thinking=THINKING, begins_thinking=begins)
    assert everything.tolist() == [True] * len(ids)


def test_a_model_without_thinking_is_trained_whole() -> None:
    assert response_mask([OPEN, 1], train_thinking=False).tolist() == [True, True]
