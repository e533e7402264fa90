"""A judgement of the fake store, and how a session was closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import StoredTurn
from clawloop.core.ids import JudgementId, TurnId
from clawloop.core.judging.records import DIRECT, Ballot, FinalizedJudgement, OpenJudgement, StoredAnswers
from clawloop.core.judging.voting import HintVote, Vote, direct_vote
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.samples.decision import is_held_out


@dataclass
class FakeJudgement:
    """
    Attributes:
        finalized: None until it is finalized.
        decided_at: when it was last finalized.
        sample: the state of its sample; None if it has none.
        step: the one that learned from the sample.
        own: the reward by its own verdict; `reward` is the sample's.
        is_opened: a worker has opened it.
    """

    id: JudgementId
    turn_id: TurnId
    revision: int
    recipe: Recipe
    next_turn_id: TurnId | None
    votes: dict[int, Vote | None] = field(default_factory=dict)
    hints: dict[tuple[str, int], HintVote | None] = field(default_factory=dict)
    direct: Mapping[Vote, float] | None = None
    finalized: FinalizedJudgement | None = None
    decided_at: datetime | None = None
    sample: SampleState | None = None
    reward: float | None = None
    own: float | None = None
    step: int | None = None
    is_opened: bool = False

    @property
    def mean_vote(self) -> float | None:
        votes = [vote for vote in self.votes.values() if vote is not None]
        return sum(votes) / len(votes) if votes else None

    def decide(self, finalized: FinalizedJudgement, own: float | None) -> None:
        self.finalized, self.own, self.reward = finalized, own, finalized.reward or None
        self.decided_at = datetime.now(UTC)

    def open(self, hint_kind: str) -> OpenJudgement:
        """The judgement as a worker opens it; from the second time on it is continued."""
        continued, self.is_opened = self.is_opened, True
        hints = self.stored().hints_of(hint_kind)
        return OpenJudgement(self.id, self.recipe, dict(self.votes), hints, self.direct, self.decided_at, continued)

    def stored(self) -> StoredAnswers:
        return StoredAnswers(dict(self.votes), dict(self.hints), self.direct, self.decided_at)

    def has_votes(self, ballot: Ballot) -> bool:
        """Whether the ballot has the stored votes."""
        if ballot.kind == DIRECT:
            return ballot.scores == (None if self.direct is None else direct_vote(self.direct).verdict,)
        return [self.votes.get(index) for index in range(len(ballot.scores))] == list(ballot.scores)


@dataclass
class Closed:
    first: datetime
    state: SessionState


def new_sample_state(turn: StoredTurn | None, recipe: Recipe) -> SampleState:
    """The state of a new sample of the turn."""
    assert turn is not None
    unit = turn.record.group_id or turn.session_id
    held_out = is_held_out(turn.record.policy, unit, recipe.gate.held_out)
    return SampleState.HELD_OUT if held_out else SampleState.FRESH
