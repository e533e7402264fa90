"""Agreement of two judges on the same turns, and of votes with the outcomes of episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clawloop.core.judging.voting import Vote, majority

# Two judges -----------------------------------------------------------------------------------------------------------
# Agreement of two judges on the same turns.


@dataclass(frozen=True, slots=True)
class Pair:
    """Two verdicts on one turn.

    Args:
        version: the version that answered.
        before: the verdict that stands.
        after: the other one; None if there was no valid vote.
    """

    version: int
    before: int
    after: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Number of turns with this pair of verdicts."""

    before: int
    after: int | None
    turns: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """
    Args:
        turns: with and without a new verdict.
        agreed: with the same verdict.
        missing: without a new verdict; they count neither way.
        share: agreed, of those that have one; None without any.
        kappa: Cohen's: 1 is full agreement, 0 what chance gives; None where one verdict is all there is.
        cells: how often each pair of verdicts occurs.
    """

    turns: int
    agreed: int
    missing: int
    share: float | None
    kappa: float | None
    cells: tuple[Cell, ...]


def agreement(pairs: Iterable[Pair]) -> Agreement:
    """The agreement over all these turns."""
    counts = Counter((pair.before, pair.after) for pair in pairs)
    voted = {(before, after): turns for (before, after), turns in counts.items() if after is not None}
    total, agreed = sum(voted.values()), sum(turns for (before, after), turns in voted.items() if before == after)
    by_before: Counter[int] = Counter()
    by_after: Counter[int] = Counter()
    for (before, after), turns in voted.items():
        by_before[before] += turns
        by_after[after] += turns
    share = agreed / total if total else None
    chance = sum(by_before[verdict] * by_after[verdict] for verdict in by_before) / total**2 if total else 1.0
    order = sorted(counts.items(), key=lambda item: (-item[0][0], item[0][1] is None, -(item[0][1] or 0)))
    return Agreement(
        turns=sum(counts.values()),
        agreed=agreed,
        missing=sum(counts.values()) - total,
        share=share,
        kappa=None if share is None or chance == 1.0 else (share - chance) / (1 - chance),
        cells=tuple(Cell(before, after, turns) for (before, after), turns in order),
    )


def by_version(pairs: Iterable[Pair]) -> dict[int, Agreement]:
    """The agreement on each version's replies, by version."""
    listed = list(pairs)
    versions = sorted({pair.version for pair in listed})
    return {version: agreement(pair for pair in listed if pair.version == version) for version in versions}


# Votes and outcomes ---------------------------------------------------------------------------------------------------
# Agreement of votes on an episode's turns with its verifier, by the number of votes in a verdict.
#
# RLAnything (arXiv 2602.02488) expects a majority to become more precise with the number of votes; here it is counted.


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
