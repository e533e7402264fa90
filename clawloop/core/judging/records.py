"""Records that judging and its store pass to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from clawloop.core.contracts.lessons import Correction
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import StoredTurn, TurnOutcome
from clawloop.core.ids import ApiKeyId, FeedbackId, JudgementId, SessionId, TurnId
from clawloop.core.judging.hints import HintChoice, PromptChange
from clawloop.core.judging.voting import HintVote, Verdict, Vote
from clawloop.core.recipes.recipe import CONTROL, Recipe
from clawloop.core.turns.parents import Candidate
from clawloop.core.turns.places import PlacedReply

VOTES = "sampled"  # kind of the votes that are sampled from a judge
DIRECT = "direct"  # kind of a direct vote; the raw answer is the log-probs of the three choices
StoredVote: TypeAlias = tuple[int, str, Vote | None]
"""A vote's index, the judge's answer as it came, and what it says; None if it cannot be read."""
StoredHint: TypeAlias = tuple[int, str, HintVote | None]
"""Likewise for a hint."""

HINTS = "hint"  # kind of a hint by the next state; with feedback texts their number is added


@dataclass(frozen=True, slots=True)
class CurrentJudgement:
    """A turn's newest decided judgement.

    Args:
        outcome: the turn's outcome by this judgement.
        next_turn_id: the turn whose request holds the next state; None if the turn was judged by feedback alone.
        by_words: its recipe learns from words, as `Signal.learns_from_words` says.
    """

    revision: int
    outcome: TurnOutcome
    verdict: int | None
    next_turn_id: TurnId | None
    by_words: bool = False


@dataclass(frozen=True, slots=True)
class TurnContext:
    """A main turn and its neighbours in the session.

    Args:
        number: position among the session's main turns, from 1.
        seed: where the prefix digests of the turn's API key begin.
        candidates: older turns of the session whose replies the turn's request holds.
        follows: the nearest main turn above; side turns between do not count.
        followed_by: the nearest main turns below, oldest first.
        overtaken_by: those of `followed_by` that were stored or signalled before the turn.
        current: the newest decided judgement; None if there is none.
        task_outcome: whether the session's task succeeded, 1 or −1; None if not known.
        feedback: all feedback on the turn, oldest first.
        placed: replies in the turn's request that were found by their place.
    """

    turn: StoredTurn
    number: int
    seed: bytes
    candidates: Sequence[Candidate]
    follows: TurnId | None
    followed_by: Sequence[TurnId]
    overtaken_by: frozenset[TurnId]
    current: CurrentJudgement | None
    task_outcome: int | None = None
    feedback: Sequence[GivenFeedback] = ()
    placed: Sequence[PlacedReply] = ()


@dataclass(frozen=True, slots=True)
class JudgingContext:
    """All that is read before a turn is judged.

    Args:
        turn: the turn that a workflow was signalled.
        before: the main turn that it follows; None if there is none.
        trained: the session's newest trained turns, for the workflow's table.
    """

    turn: TurnContext
    before: TurnContext | None
    trained: list[TurnResult]


@dataclass(frozen=True, slots=True)
class GivenFeedback:
    """Feedback on a turn, given outside the conversation; a score is the verdict.

    Args:
        applied: a judgement has used it.
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
    """A judgement in progress, or one that feedback reopens.

    Args:
        votes: stored votes by index; None for an answer that cannot be read.
        hints: stored hints of the kind asked for, likewise.
        direct: log-probs of the direct vote; None if there is none yet.
        decided_at: when it was decided before; None: it is not decided yet.
        continued: a worker opened it before, which may go on.
    """

    id: JudgementId
    recipe: Recipe
    votes: dict[int, Vote | None]
    hints: dict[int, HintVote | None]
    direct: Mapping[Vote, float] | None = None
    decided_at: datetime | None = None
    continued: bool = False


@dataclass(frozen=True, slots=True)
class StoredAnswers:
    """The answers stored of a judgement so far, by any worker.

    Args:
        votes: by index; None for an answer that cannot be read.
        hints: by kind and index, likewise.
        direct: log-probs of the direct vote; None if there is none.
        decided_at: when the judgement was last decided; None: it is not decided.
    """

    votes: Mapping[int, Vote | None] = field(default_factory=dict)
    hints: Mapping[tuple[str, int], HintVote | None] = field(default_factory=dict)
    direct: Mapping[Vote, float] | None = None
    decided_at: datetime | None = None

    def hints_of(self, kind: str) -> dict[int, HintVote | None]:
        """The hints of one kind, by index."""
        return {index: hint for (of, index), hint in self.hints.items() if of == kind}


class Relation(StrEnum):
    """The value that a reward is compared with; the store reads it when the judgement is finalized."""

    NONE = "none"
    MEAN = "mean"  # the policy's mean verdict so far
    GROUP = "group"  # the other responses to the same prompt
    OUTCOME = "outcome"  # whether the session's task succeeded


@dataclass(frozen=True, slots=True)
class Ballot:
    """All votes a verdict was decided by.

    Args:
        kind: VOTES or DIRECT.
        scores: by index; None for a vote that is missing or cannot be read.
    """

    kind: str
    scores: tuple[Vote | None, ...]


@dataclass(frozen=True, slots=True)
class TurnDecision:
    """A turn's outcome and the terms of its sample.

    Args:
        outcome: SAMPLED exactly when there is a term.
        why: one line for people.
        reward: the reward term; None if there is none.
        hints: for the teacher term; empty if there is none.
    """

    outcome: TurnOutcome
    why: str
    reward: float | None = None
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalizedJudgement:
    """A decided judgement: the verdict, the hints and the turn's outcome.

    Args:
        not_trainable: why the turn cannot be trained whatever the verdict; None if it can.
        reward: by the turn's own verdict. With a relation it may be 0, without one 0 is None.
        hinted_prompts: one for each hint, in their order; empty without a teacher term.
        control_prompt: likewise with a hint that says nothing; None if the engine renders none.
        relation: what the store measures the reward against; `outcome` and `why` do not include it yet.
        ballot: the votes the verdict was decided by; None for a rating, or without votes.
        sampled: the judgement gives a sample with `reward` and `hinted_prompts`.
        correction: becomes a lesson; None: the recipe takes none from corrections, or there was none.
    """

    verdict: Verdict
    hint: HintChoice
    not_trainable: str | None
    reward: float | None
    hinted_prompts: tuple[PromptChange, ...]
    outcome: TurnOutcome
    why: str
    relation: Relation = Relation.NONE
    ballot: Ballot | None = None
    control_prompt: PromptChange | None = None
    correction: Correction | None = None

    @property
    def sampled(self) -> bool:
        return self.outcome is TurnOutcome.SAMPLED

    @property
    def prompts_by_place(self) -> dict[int, PromptChange]:
        """The hinted prompts by their hints' places, and the control at its own; empty without a hint."""
        prompts = dict(enumerate(self.hinted_prompts))
        return prompts | {CONTROL: self.control_prompt} if prompts and self.control_prompt else prompts


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A main turn of a session that is closing.

    Args:
        number: position among the session's main turns, from 1.
        followed_by: main turns that follow it, oldest first.
        last: it is the session's newest main turn.
        expected: expected score; None without a valid vote.
        trainable: None if the turn was not judged.
        samples: how many it has in any state but superseded.
        direct: log-probs of its direct vote; None if there is none.
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
    """A session that is closing.

    Args:
        turns: at the first close all main turns, later only those that are waiting.
        first_close: the session was never closed before.
        at_least_one: the policy's recipe wants at least one sample of each session.
        main_turns: how many main turns there are.
        has_related_rewards: some rewards depend on other turns or on the task's outcome.
        learns_by_outcome: the task's outcome is known, and the policy's recipe rewards it.
        closed: the session is closed, and no turn has come since.
    """

    session_id: SessionId
    turns: Sequence[SessionTurn]
    first_close: bool
    at_least_one: bool
    main_turns: int
    has_related_rewards: bool = False
    learns_by_outcome: bool = False
    closed: bool = False
