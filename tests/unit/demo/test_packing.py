"""Packing: reply tokens are the targets, with their weights."""

from __future__ import annotations

import pytest

from clawloop.app.demo.packing import Encoded, pack

ONE = Encoded([5, 6, 7, 8, 9, 10], [(2, 4), (5, 6)], [[1.0, 1.0], [1.0]])
TWO = Encoded([1, 2, 3], [(1, 3)], [[1.0, 1.0]])


def test_a_pack_predicts_every_reply_token_from_the_one_before_it() -> None:
    packed = pack([ONE, TWO])
    assert packed.lengths == (5, 2)  # the last token is predicted, never read
    assert packed.tokens_S.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert packed.rows_N.tolist() == [1, 2, 4, 5, 6]
    assert packed.targets_N.tolist() == [7, 8, 10, 2, 3]


def test_tokens_weigh_what_their_lesson_says() -> None:
    light = Encoded(TWO.tokens, TWO.replies, [[0.5, 0.25]])
    weights = pack([ONE, light]).weights_N
    assert weights.sum().item() == pytest.approx(1)
    assert (weights / weights[0]).tolist() == pytest.approx([1, 1, 1, 0.5, 0.25])


def test_weights_are_given_for_each_token() -> None:
    with pytest.raises(ValueError, match="a reply of 2 tokens has 1 weights"):
        pack([Encoded([1, 2, 3], [(1, 3)], [[1.0]])])
