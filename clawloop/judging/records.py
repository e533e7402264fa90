"""What judging and its store hand to each other.

Knows nothing about Postgres or Temporal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from clawloop.contracts.turns import StoredTurn, TurnOutcome
from clawloop.ids import ApiKeyId, FeedbackId, JudgementId, SessionId, TurnId
from clawloop.judging.hints import HintChoice
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.voting import Verdict
from clawloop.recipes.recipe import Recipe
from clawloop.turns.parents import Candidate

VOTES = "sampled"  # kinds of votes
DIRECT = "direct"  # its raw answer is the log-probs of the three choices
HINTS = "hint"  # kind of a hint by the next state; with feedback texts their number is added


@dataclass(frozen=True, slots=True)
class CurrentJudgement:
    """What is held of a turn already.

    Args:
        next_turn_id: the turn whose request showed its next state; None if it was judged by feedback alone.
        outcome: what became of the turn by it.
    """

    revision: int
    outcome: TurnOutcome
    verdict: int | None
    next_turn_id: TurnId | None


@dataclass(frozen=True, slots=True)
class TurnContext:
    """A main turn among the others of its session.

    Args:
        number: its place among the session's main turns, from 1.
        seed: where its key's prefix digests begin.
        candidates: older turns of the session whose replies its request holds.
        follows: the nearest main turn it follows; side turns between them do not count.
        followed_by: main turns that follow it so, oldest first.
        overtaken_by: those of them that were entered before it.
        held: its newest decided judgement; None if it has none.
        task_outcome: whether its session's task succeeded, 1 or −1; None if nobody said.
    """

    turn: StoredTurn
    number: int
    seed: bytes
    candidates: Sequence[Candidate]
    follows: TurnId | None
    followed_by: Sequence[TurnId]
    overtaken_by: frozenset[TurnId]
    held: CurrentJudgement | None
    task_outcome: int | None = None


@dataclass(frozen=True, slots=True)
class GivenFeedback:
    """What somebody said about a turn outside the conversation; a score is the verdict.

    Args:
        applied: a judgement has taken it in.
    """

    id: FeedbackId
    turn_id: TurnId
    api_key_id: ApiKeyId
    score: float | None
    text: str | None
    received_at: datetime
    applied: bool


@dataclass(frozen=True, slots=True)
class OpenJudgement:
    """A judgement under way, or one that feedback opens anew.

    Args:
        votes: by index, those that were answered; None for an answer that cannot be read.
        hints: likewise, of the kind that is wanted now.
        direct: log-probs of its direct vote; None if there is none yet.
    """

    id: JudgementId
    recipe: Recipe
    votes: dict[int, Vote | None]
    hints: dict[int, HintVote | None]
    direct: Mapping[Vote, float] | None = None


class Relation(StrEnum):
    """What a reward is measured against, which only the store knows at the moment of settling."""

    NONE = "none"
    MEAN = "mean"  # the policy's mean verdict so far
    GROUP = "group"  # the other responses to the same prompt
    OUTCOME = "outcome"  # whether the session's task succeeded


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes a verdict was decided by: all there were.

    Args:
        kind: VOTES or DIRECT.
        scores: by index; None for one that is missing or cannot be read.
    """

    kind: str
    scores: tuple[Vote | None, ...]


@dataclass(frozen=True, slots=True)
class FinalizedJudgement:
    """A judgement's end: what is held of the turn, and what becomes of it.

    Args:
        not_trainable: why the turn cannot be trained whatever the verdict; None if it can.
        reward: by the turn's own verdict; with a relation also 0, else None for none.
        hinted_prompt_ids: None without a teacher term.
        relation: what the store sets the reward in relation to; `outcome` and `why` are then those without it.
        ballot: what the verdict was decided by; None if that was a rating, or nothing.
        sampled: it gives a sample, with `reward` and `hinted_prompt_ids`.
    """

    verdict: Verdict
    hint: HintChoice
    not_trainable: str | None
    reward: float | None
    hinted_prompt_ids: tuple[int, ...] | None
    outcome: TurnOutcome
    why: str
    relation: Relation = Relation.NONE
    ballot: Ballot | None = None

    @property
    def sampled(self) -> bool:
        return self.outcome is TurnOutcome.SAMPLED


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A main turn of a session that is to be closed.

    Args:
        followed_by: main turns that follow it, oldest first.
        last: no main turn of the session is newer.
        expected: its expected score; None if it has no valid vote.
        trainable: None if it was not judged.
        samples: how many it has, in whatever state but superseded.
        direct: log-probs of its direct vote; None if nobody asked for one.
    """

    turn_id: TurnId
    number: int
    outcome: TurnOutcome
    judged: bool
    followed_by: Sequence[TurnId]
    last: bool
    expected: float | None
    verdict: int | None
    trainable: bool | None
    samples: int
    direct: Mapping[Vote, float] | None = None


@dataclass(frozen=True, slots=True)
class ClosingSession:
    """
    Args:
        turns: its main turns that are undecided; at a first close all of them.
        first: it was never closed before.
        at_least_one: its policy's recipe wants the rule.
        main_turns: how many there are.
        related: rewards of some wait for each other, or for the session's end.
        by_outcome: somebody said how its task came out, and its policy learns by that.
        closed: it is closed, and no turn has come since.
    """

    session_id: SessionId
    turns: Sequence[SessionTurn]
    first: bool
    at_least_one: bool
    main_turns: int
    related: bool = False
    by_outcome: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """A main turn that a step has learned from.

    Args:
        number: its place among the session's main turns, from 1.
        verdict: what the sample was made by; None if it had no vote.
        step: the newest that learned from it.
        rolled_back: to where, in words, if the policy was rolled back to before that step; None if it was not.
    """

    turn_id: TurnId
    number: int
    verdict: int | None
    step: int
    rolled_back: str | None = None


@dataclass(frozen=True, slots=True)
class ExtraSample:
    """The sample of the at-least-one rule."""

    turn_id: TurnId
    reward: float
    why: str


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a turn that nobody judged."""

    turn_id: TurnId
    outcome: TurnOutcome
    why: str
