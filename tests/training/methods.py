"""Each recipe of deploy/recipes as a training step, and a batch that has what it learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clawloop.core.algorithms.rewards import group_advantages, integrated_reward, process_reward
from clawloop.core.contracts.training import BatchSample
from clawloop.core.judging.voting import Vote, majority
from clawloop.core.recipes.recipe import CONTROL, Optimiser, Train, load_recipe
from clawloop.training.model.port import PolicyModel
from clawloop.training.packing import Limits
from tests.training.tiny import VOCAB, session_batch

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
METHODS = sorted(path.stem for path in RECIPES.glob("*.toml"))
# Several micro-batches, so that samples of one step are apart, and some share what they begin with.
LIMITS = Limits(budget_tokens=130, max_tokens=256, vocab_size=VOCAB)


def train_part(method: str, **changed: float) -> Train:
    """What a step of this recipe does, but for these keys of its optimiser."""
    train = load_recipe(RECIPES / f"{method}.toml").train
    optimiser = Optimiser(**train.optimiser.model_dump() | changed)
    return train.model_copy(update={"optimiser": optimiser})


def _by_outcome(outcome: int, votes: list[Vote | None]) -> float | None:
    expected = majority(votes).expected
    return integrated_reward(outcome, None if expected is None else process_reward(expected, process_weight=1.0))


def batch_of(method: str, model: PolicyModel, *, version: int = 1, seed: int = 5) -> list[BatchSample]:
    """Five turns of a session and a group of three, rewarded and hinted as this recipe's signal would."""
    samples = session_batch(model, version=version, seed=seed)
    signal = load_recipe(RECIPES / f"{method}.toml").signal
    rewards: list[float | None]
    if not signal.takes_ratings:
        rewards = [None] * 8
    elif signal.reward == "group":
        rewards = [1.0, -1.0, 1.0, 1.0, -1.0, *group_advantages((1.0, -1.0, 1.0))]
    elif signal.reward == "outcome_process":
        succeeded: list[list[Vote | None]] = [[1, 1, -1], [1, 1, 1], [-1, -1, 1], [1, None, -1], [1, 1, 1]]
        failed: list[list[Vote | None]] = [[1, -1, -1], [-1, -1, -1], [-1]]
        rewards = [_by_outcome(1, votes) for votes in succeeded] + [_by_outcome(-1, votes) for votes in failed]
    elif signal.hints:
        rewards = [1.0, None, -1.0, 0.0, 1.0, -1.0, None, 1.0]  # None and 0: a hint and no verdict
    else:
        rewards = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    if signal.asks_for_hints:  # further hints, of which a recipe may choose
        samples = [
            replace(one, hinted_prompts={0: hinted, 1: hinted[:-3], 2: one.prompt_ids[4:]})
            for one in samples
            for hinted in [one.hinted_prompts[0]]
        ]
    if signal.hints:
        samples = [
            replace(one, hinted_prompts={**one.hinted_prompts, CONTROL: [*one.prompt_ids, *one.prompt_ids[:2]]})
            for one in samples
        ]
    unhinted = {0, 5, 7} if signal.takes_ratings else set()
    return [
        replace(
            sample,
            reward=reward,
            hinted_prompts=sample.hinted_prompts if signal.hints and index not in unhinted else {},
        )
        for index, (sample, reward) in enumerate(zip(samples, rewards, strict=True))
    ]
