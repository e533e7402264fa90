"""Settling a rollout group."""

from __future__ import annotations

from uuid import uuid4

import pytest

from clawloop.core.contracts.episodes import EpisodeState, GroupState, RewardRange
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
        # R_i = O + λ · the mean of its turns' votes: 1.375, -1.5 and -1; with λ = 2 they are 2.5, -3 and -1.
        ("episode", 0.5, [[1.39536] * 3, [-0.89701] * 2, [-0.49834]]),
        ("episode", 2.0, [[1.31982] * 3, [-1.09985] * 2, [-0.21997]]),
        # R_ij = O + λ · its own: 1.5, -1.5 and -1 of the first turns, 1.25 and -1 of the second; a third has no other.
        ("step", 0.5, [[1.39700, 1.0, 1.0], [-0.88900, -1.0], [-0.50800]]),
    ],
)
def test_votes_count_by_their_weight(unit: str, weight: float, expected: list[list[float | None]]) -> None:
    members = [_voted(1, [1.0, 0.5, None]), _voted(0, [-1.0, None]), _voted(0, [None])]
    signal = {"reward": "outcome_process", "process_weight": weight, "episode_advantage": unit}
    settlement = settle(members, Signal.model_validate(signal))
    for member, advantages in zip(members, expected, strict=True):
        found = [settlement.turns[turn.id].advantage for turn in member.turns]
        assert found == [None if one is None else pytest.approx(one, rel=1e-4) for one in advantages]


@pytest.mark.parametrize("unit", ["episode", "step"])
def test_a_failed_episode_with_good_votes_is_blamed_as_the_formula_says(unit: str) -> None:
    """R = O + mean vote with O in −1/+1 (arXiv 2602.02488): with the verifier's 0/1 as O the first one was praised."""
    members = [_voted(0, [1.0]), _voted(1, [-0.5]), _voted(0, [-1.0]), _voted(1, [1.0])]
    settlement = settle(members, Signal.model_validate({"reward": "outcome_process", "episode_advantage": unit}))
    rewards = [-1 + 1.0, 1 - 0.5, -1 - 1.0, 1 + 1.0]
    mean = sum(rewards) / 4
    spread = (sum((reward - mean) ** 2 for reward in rewards) / 4) ** 0.5
    for member, reward in zip(members, rewards, strict=True):
        advantage = settlement.turns[member.turns[0].id].advantage
        assert advantage == pytest.approx((reward - mean) / spread)
    assert (settlement.turns[members[0].turns[0].id].advantage or 0) < 0


def _long(reward: float, *replies: tuple[int | None, bool]) -> Member:
    turns = [EpisodeTurn(TurnId(uuid4()), None, tokens=tokens, cut_by_length=cut) for tokens, cut in replies]
    return Member(EpisodeId(uuid4()), EpisodeState.SCORED, reward, None, turns)


@pytest.mark.parametrize("reward", ["group", "outcome_process"])
def test_long_replies_of_episodes_are_penalised_as_those_of_chats(reward: str) -> None:
    signal = {"reward": reward, "overlong": {"limit_tokens": 100, "cache_tokens": 50}}
    # O + penalty of each turn: 1 - 0.5, 1 and -1 - 1 of the first turns; 1 and -1 of the second.
    members = [_long(1, (75, False), (50, False)), _long(1, (10, False)), _long(0, (20, True), (None, False))]
    by_step = settle(members, Signal.model_validate({**signal, "episode_advantage": "step"}))
    found = [[by_step.turns[turn.id].advantage for turn in member.turns] for member in members]
    expected = [[0.50800, 1.0], [0.88900], [-1.39700, -1.0]]
    assert found == [[pytest.approx(one, rel=1e-4) for one in of_member] for of_member in expected]
    assert ", length -0.50," in by_step.turns[members[0].turns[0].id].why
    # O + the mean penalty of its turns: 0.75, 1 and -2; the reply without an end has none.
    whole = settle(members, Signal.model_validate({**signal, "episode_advantage": "episode"}))
    advantages = [whole.advantages[member.id] for member in members if member.id is not None]
    assert advantages == [pytest.approx(one, rel=1e-4) for one in (0.61314, 0.79708, -1.41022)]


@pytest.mark.parametrize(("reward", "share"), [(-2.0, 0.0), (0.0, 0.5), (2.0000000001, 1.0)])
def test_a_reward_is_its_place_in_its_verifiers_range(reward: float, share: float) -> None:
    assert RewardRange(-2, 2).share(reward) == share


@pytest.mark.parametrize("reward", [-2.1, 2.1, float("nan"), float("inf")])
def test_a_reward_outside_its_verifiers_range_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        RewardRange(-2, 2).share(reward)


@pytest.mark.parametrize("ends", [(1, 1), (1, 0), (0, float("inf")), (float("nan"), 1)])
def test_a_range_has_two_ends(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no range"):
        RewardRange(*ends)
