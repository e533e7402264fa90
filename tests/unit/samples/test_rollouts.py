"""Settling a rollout group."""

from __future__ import annotations

from uuid import uuid4

import pytest

from clawloop.core.contracts.episodes import EpisodeState, GroupState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import EpisodeId, TurnId
from clawloop.core.recipes.recipe import Signal
from clawloop.core.samples.rollouts import EpisodeTurn, Member, settle


def _member(reward: float | None, turns: int) -> Member:
    state = EpisodeState.UNSCORED if reward is None else EpisodeState.SCORED
    return Member(EpisodeId(uuid4()), state, reward, None, [EpisodeTurn(TurnId(uuid4()), None) for _ in range(turns)])


@pytest.mark.parametrize("unit", ["episode", "step"])
def test_a_group_with_an_episode_that_has_turns_and_no_reward_is_settled(unit: str) -> None:
    members = [_member(1, 2), _member(0, 2), _member(None, 3)]
    settlement = settle(members, Signal.model_validate({"reward": "group", "episode_advantage": unit}))
    assert settlement.state is GroupState.SETTLED
    outcomes = [{settlement.turns[turn.id].outcome for turn in member.turns} for member in members]
    assert outcomes == [{TurnOutcome.SAMPLED}, {TurnOutcome.SAMPLED}, {TurnOutcome.UNJUDGED}]


def _voted(reward: float, votes: list[float | None]) -> Member:
    turns = [EpisodeTurn(TurnId(uuid4()), None, votes=vote) for vote in votes]
    return Member(EpisodeId(uuid4()), EpisodeState.SCORED, reward, None, turns)


@pytest.mark.parametrize(
    ("unit", "weight", "expected"),
    [
        # R_i = O + λ · the mean of its turns' votes: 1.375, -0.5 and 0; with λ = 2 they are 2.5, -2 and 0.
        ("episode", 0.5, [[1.36653] * 3, [-0.99862] * 2, [-0.36791]]),
        ("episode", 2.0, [[1.26750] * 3, [-1.17697] * 2, [-0.09054]]),
        # R_ij = O + λ · its own: 1.5, -0.5 and 0 of the first turns, 1.25 and 0 of the second; the third has no other.
        ("step", 0.5, [[1.37281, 1.0, None], [-0.98058, -1.0], [-0.39223]]),
    ],
)
def test_votes_count_by_their_weight(unit: str, weight: float, expected: list[list[float | None]]) -> None:
    members = [_voted(1, [1.0, 0.5, None]), _voted(0, [-1.0, None]), _voted(0, [None])]
    signal = {"reward": "outcome_process", "process_weight": weight, "episode_advantage": unit}
    settlement = settle(members, Signal.model_validate(signal))
    for member, advantages in zip(members, expected, strict=True):
        found = [settlement.turns[turn.id].advantage for turn in member.turns]
        assert found == [None if one is None else pytest.approx(one, rel=1e-4) for one in advantages]
