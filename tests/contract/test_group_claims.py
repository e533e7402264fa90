"""Claims of a recipe that compares groups, and after an operator has set another recipe."""

from __future__ import annotations

from dataclasses import replace

import psycopg

from clawloop.core.contracts.training import SampleState, StepState
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.ids import SampleId
from clawloop.core.judging.hints import NOT_ASKED
from clawloop.core.judging.records import FinalizedJudgement, Relation
from clawloop.core.judging.voting import rated
from clawloop.core.recipes.recipe import Recipe
from db.training.recipes import set_recipe
from tests.contract.learning import POLICY, PostgresLearning, recipe
from tests.records import turn_record


def grouped(batch_samples: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "grouped",
            "signal": {"hints": False, "reward": "group"},
            "train": {"batch_samples": batch_samples, "advantage": {"teacher_weight": 0.0}},
        }
    )


async def add_group(learning: PostgresLearning, name: str, *rewards: float) -> list[SampleId]:
    """The samples of the responses to one prompt."""
    evidence = SessionEvidence(SessionSource.HEADER, name)
    turns = [turn_record(name, api_key_id=learning.key, evidence=evidence, choice=n) for n in range(len(rewards))]
    turns = [replace(turn, group_id=turns[0].turn_id) for turn in turns]
    for turn in turns:
        await learning.turns.insert(turn)
    for turn, reward in zip(turns, rewards, strict=True):
        opened = await learning.judgements.open(turn.turn_id, None, b"e", "hint")
        finalized = FinalizedJudgement(
            rated(reward), NOT_ASKED, None, reward, None, TurnOutcome.SAMPLED, "rated", Relation.GROUP
        )
        await learning.judgements.finalize(opened.id, finalized, [])
    query = "SELECT s.id FROM samples s JOIN turns t ON t.id = s.turn_id WHERE t.group_id = %s ORDER BY s.id"
    return [SampleId(row["id"]) for row in await learning.rows(query, turns[0].turn_id)]


async def test_a_group_is_claimed_as_a_whole(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(grouped(4))
    first = await add_group(learning, "a", 1, -1, 1)
    second = await add_group(learning, "b", -1, 1, 1)
    third = await add_group(learning, "c", 1, -1)
    assert (await learning.steps.claim(POLICY, 1)).samples == 6
    batch = await learning.steps.batch(POLICY, 1)
    assert [sample.sample_id for sample in batch.samples] == [*first, *second]
    assert [round(sample.reward or 0, 2) for sample in batch.samples] == [0.71, -1.41, 0.71, -1.41, 0.71, 0.71]
    assert [(await learning.sample_result(sample))[0] for sample in third] == [SampleState.FRESH] * 2


async def test_a_group_with_a_locked_turn_waits_as_a_whole(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(grouped(2))
    (_, locked, _) = await add_group(learning, "a", 1, -1, 1)
    other = await add_group(learning, "b", 1, -1)
    async with await psycopg.AsyncConnection.connect(learning.url) as connection:
        lock = "SELECT 1 FROM turns t JOIN samples s ON s.turn_id = t.id WHERE s.id = %s FOR UPDATE OF t"
        await connection.execute(lock, [locked])
        assert (await learning.steps.claim(POLICY, 1)).state is None
        await connection.rollback()
    assert (await learning.steps.claim(POLICY, 1)).samples == 3
    assert [(await learning.sample_result(sample))[0] for sample in other] == [SampleState.FRESH] * 2


async def test_an_operators_recipe_keeps_samples_of_the_same_signal_and_lets_the_others_expire(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    samples = await learning.add_samples(4)
    await set_recipe(learning.database, POLICY, recipe(batch_samples=4, drift=0.5))
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 4)
    await learning.steps.abandon(POLICY, 1, "the trainer is gone")
    await set_recipe(learning.database, POLICY, Recipe.model_validate({"name": "small", "signal": {"votes": "direct"}}))
    assert (await learning.steps.claim(POLICY, 2)).state is None
    changed = (SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")
    assert [await learning.sample_result(sample) for sample in samples] == [changed] * 4
