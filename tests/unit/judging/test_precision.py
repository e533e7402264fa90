"""The precision of votes against outcomes, counted by hand."""

from __future__ import annotations

from clawloop.core.judging.agreement import Precision, VotedTurn, precision_by_votes


def test_more_votes_are_a_majority_of_more() -> None:
    turns = [
        VotedTurn([1, -1, -1], succeeded=False),
        VotedTurn([1, 1, -1], succeeded=True),
        VotedTurn([-1, 1, 1], succeeded=True),
        VotedTurn([-1, -1, None], succeeded=False),
    ]
    assert precision_by_votes(turns) == (
        Precision(m=1, turns=4, base=0.5, good=2, good_precision=0.5, bad=2, bad_precision=0.5),
        Precision(m=3, turns=4, base=0.5, good=2, good_precision=1.0, bad=2, bad_precision=1.0),
    )


def test_ties_and_missing_votes_are_neither_praise_nor_blame() -> None:
    turns = [VotedTurn([None], True), VotedTurn([0], True), VotedTurn([0, 1, -1], False)]
    one, three = precision_by_votes(turns)
    assert one == Precision(m=1, turns=3, base=2 / 3, good=0, good_precision=None, bad=0, bad_precision=None)
    assert three == Precision(m=3, turns=1, base=0.0, good=0, good_precision=None, bad=0, bad_precision=None)


def test_without_votes_nothing_is_known() -> None:
    assert precision_by_votes([]) == ()
    assert precision_by_votes([VotedTurn([], True)]) == ()
