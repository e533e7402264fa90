"""Agreement of votes on an episode's turns with its verifier, by the number of votes in a verdict.

RLAnything (arXiv 2602.02488) expects a majority to become more precise with the number of votes; here it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.judging.parsing import Vote
from clawloop.judging.voting import majority


@dataclass(frozen=True, slots=True)
class VotedTurn:
    """A turn of an episode that has a reward.

    Args:
        votes: in the order they were asked for; None: an answer that cannot be read.
        succeeded: of its episode.
    """

    votes: Sequence[Vote | None]
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of the majority of a turn's first m votes, compared with the outcome of the turn's episode.

    Args:
        m: number of votes.
        turns: that have so many votes; those of a verdict of 0 or without a valid vote are among them.
        base: share of these turns whose episode succeeded: the precision of a judge that praises everything.
        good, bad: turns with this verdict.
        good_precision: share of the praised turns whose episode succeeded; None without any.
        bad_precision: share of the blamed turns whose episode failed; None without any.
    """

    m: int
    turns: int
    base: float
    good: int
    good_precision: float | None
    bad: int
    bad_precision: float | None


def precision_by_votes(turns: Sequence[VotedTurn]) -> tuple[Precision, ...]:
    """The precision for m = 1, 3, 5 and so on, as far as turns have votes.

    A turn that helped an episode which failed all the same counts against the judge, so 1 cannot be expected; rows are
    to be compared with each other and with `base`.
    """
    most = max((len(turn.votes) for turn in turns), default=0)
    return tuple(_precision(m, [turn for turn in turns if len(turn.votes) >= m]) for m in range(1, most + 1, 2))


def _precision(m: int, turns: Sequence[VotedTurn]) -> Precision:
    verdicts = [(majority(turn.votes[:m]).verdict, turn.succeeded) for turn in turns]
    praised = [succeeded for verdict, succeeded in verdicts if verdict == 1]
    blamed = [not succeeded for verdict, succeeded in verdicts if verdict == -1]
    return Precision(
        m=m,
        turns=len(turns),
        base=sum(turn.succeeded for turn in turns) / len(turns),
        good=len(praised),
        good_precision=sum(praised) / len(praised) if praised else None,
        bad=len(blamed),
        bad_precision=sum(blamed) / len(blamed) if blamed else None,
    )
