"""Settling a rollout group."""

from __future__ import annotations

from uuid import uuid4

import pytest

from clawloop.contracts.episodes import EpisodeState, GroupState
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import EpisodeId, TurnId
from clawloop.recipes.recipe import Signal
from clawloop.samples.rollouts import EpisodeTurn, Member, settle


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
