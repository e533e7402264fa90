"""Pretraining: the tokens of replies are the targets, with their weights."""

from __future__ import annotations

import pytest

from clawloop.app.demo.pretrain import Encoded, batched

ONE = Encoded([5, 6, 7, 8, 9, 10], [(2, 4), (5, 6)], [[1.0, 1.0], [1.0]])
TWO = Encoded([1, 2, 3], [(1, 3)], [[0.5, 0.25]])


def test_every_reply_token_is_predicted_from_the_one_before_it() -> None:
    batch = batched([ONE, TWO])
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]  # the last token is predicted, never read
    assert batch.lessons_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.places_N.tolist() == [1, 2, 4, 0, 1]
    assert batch.targets_N.tolist() == [7, 8, 10, 2, 3]
    assert batch.weights_N.tolist() == [1, 1, 1, 0.5, 0.25]


def test_weights_are_given_for_each_token() -> None:
    with pytest.raises(ValueError, match="a reply of 2 tokens has 1 weights"):
        batched([Encoded([1, 2, 3], [(1, 3)], [[1.0]])])
