"""A judgement of the fake store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clawloop.contracts.training import SampleState
from clawloop.ids import JudgementId, TurnId
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.records import DIRECT, Ballot, FinalizedJudgement
from clawloop.judging.voting import direct_vote
from clawloop.recipes.recipe import Recipe


@dataclass
class FakeJudgement:
    """
    Attributes:
        finalized: None until it is finalized.
        sample: the state of its sample; None if it has none.
        step: the one that learned from the sample.
        own: the reward by its own verdict; `reward` is the sample's.
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
    sample: SampleState | None = None
    reward: float | None = None
    own: float | None = None
    step: int | None = None

    def has_votes(self, ballot: Ballot) -> bool:
        """Whether the ballot has the stored votes."""
        if ballot.kind == DIRECT:
            return ballot.scores == (None if self.direct is None else direct_vote(self.direct).verdict,)
        return [self.votes.get(index) for index in range(len(ballot.scores))] == list(ballot.scores)
