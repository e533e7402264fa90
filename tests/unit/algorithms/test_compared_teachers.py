"""The overlap of teachers with the version that answered, and the hint it chooses, against sets of Python integers."""

from __future__ import annotations

import math
import random

import pytest
import torch

from clawloop.core.algorithms.advantages import support_advantage
from clawloop.core.algorithms.scoring import TopKOf, choose_hint, compare
from tests.unit.algorithms.plain import log_softmax

V, T, H, K = 9, 5, 3, 4


def _likeliest(row: list[float]) -> list[int]:
    return sorted(range(V), key=lambda token: -row[token])[:K]


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("of", ["student", "teacher", "overlap"])
@pytest.mark.parametrize("seed", range(5))
def test_a_comparison_is_that_of_sets_and_plain_softmax(of: TopKOf, seed: int, controlled: bool) -> None:
    rng = random.Random(seed)
    answered = [[rng.gauss(0, 1) for _ in range(V)] for _ in range(T)]
    teachers = [[[value + rng.gauss(0, 0.7) for value in row] for row in answered] for _ in range(H)]
    control = [[value + rng.gauss(0, 0.7) for value in row] for row in answered]
    read = [answered, control, *teachers] if controlled else [answered, *teachers]
    found = compare(torch.tensor(read, dtype=torch.float64), temperature=0.6, k=K, of=of, controlled=controlled)
    if controlled:  # π_T is proportional to π_v·π_hint/π_control
        teachers = [
            [[own + taught - of_control for own, taught, of_control in zip(*rows, strict=True)] for rows in each]
            for each in (zip(answered, hinted, control, strict=True) for hinted in teachers)
        ]
    for h in range(H):
        for t in range(T):
            own, taught = _likeliest(answered[t]), _likeliest(teachers[h][t])
            assert int(found.overlap_HT[h, t]) == len({*own} & {*taught})
            ids = taught if of == "teacher" else own
            assert found.ids_HTK[h, t].tolist() == ids
            inside = [of != "overlap" or token in taught for token in ids]
            assert found.within_HTK[h, t].tolist() == inside
            before, after = log_softmax(answered[t], 0.6), log_softmax(teachers[h][t], 0.6)
            assert found.answered_HTK[h, t].tolist() == pytest.approx([before[token] for token in ids])
            assert found.teacher_HTK[h, t].tolist() == pytest.approx([after[token] for token in ids])
            rest = math.log(sum(math.exp(after[token]) for token in range(V) if token not in ids))
            assert float(found.tail_HT[h, t]) == pytest.approx(rest)
            distance = sum(math.exp(after[token]) * (after[token] - before[token]) for token in range(V))
            assert float(found.distance_HT[h, t]) == pytest.approx(distance)


def test_the_hint_with_the_largest_overlap_over_the_reply_teaches_all_of_it() -> None:
    overlap_HT = torch.tensor([[4, 0, 0, 3], [2, 2, 2, 2], [2, 2, 2, 2]])
    assert choose_hint(overlap_HT, per_token=False).tolist() == [1, 1, 1, 1]


def test_per_token_the_larger_overlap_over_the_reply_decides_between_equals() -> None:
    overlap_HT = torch.tensor([[4, 0, 2, 1], [2, 2, 2, 2], [0, 2, 2, 2]])
    assert choose_hint(overlap_HT, per_token=True).tolist() == [0, 1, 1, 1]


def test_an_empty_support_teaches_nothing() -> None:
    numbers = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    within = torch.tensor([[False, False], [False, True]])
    found = support_advantage(numbers + 3.0, numbers, within, 1.0)
    assert found.tolist() == [[0.0, 0.0], [0.0, 1.0]]
