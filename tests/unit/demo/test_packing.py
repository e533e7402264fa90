"""Packing: a lesson in a pack is read as if it were alone."""

from __future__ import annotations

import pytest
import torch

from clawloop.demo.packing import Encoded, attend_within_lessons, pack

ONE = Encoded([5, 6, 7, 8, 9, 10], [(2, 4), (5, 6)])
TWO = Encoded([1, 2, 3], [(1, 3)])


def test_a_pack_predicts_every_reply_token_from_the_one_before_it() -> None:
    packed = pack([ONE, TWO])
    assert packed.lengths == (5, 2)  # the last token is predicted, never read
    assert packed.tokens_S.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert packed.positions_S.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.rows_N.tolist() == [1, 2, 4, 5, 6]
    assert packed.targets_N.tolist() == [7, 8, 10, 2, 3]


def test_a_lessons_tokens_weigh_what_it_says() -> None:
    light = Encoded(TWO.tokens, TWO.replies, weight=0.5)
    weights = pack([ONE, light]).weights_N
    assert weights.sum().item() == pytest.approx(1)
    assert (weights[0] / weights[-1]).item() == pytest.approx(2)


def test_attention_stays_within_a_lesson() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    module = torch.nn.Identity()
    whole, _ = attend_within_lessons(module, query, key, value, None, scaling=0.3, lengths=(5, 2))
    alone, _ = attend_within_lessons(
        module, query[:, :, 5:], key[:, :, 5:], value[:, :, 5:], None, scaling=0.3, lengths=(2,)
    )
    assert whole.shape == (1, 7, 4, 8)
    torch.testing.assert_close(whole[:, 5:], alone)
