"""Held-out sessions and groups: judged, shown and never trained, in memory and in PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from clawloop.core.contracts.training import BatchSample, HeldOutScore, SampleState, StepBatch, StepState
from clawloop.core.contracts.turns import TurnOutcome, TurnRecord
from clawloop.core.recipes.recipe import Gate, Recipe, Train
from clawloop.core.samples.decision import is_held_out
from db.database import Database
from db.training.gate_checks import read_held_out
from db.training.status import read_status
from db.turns.read import ConversationCache
from tests.contract.learning import POLICY, PostgresLearning, commit, recipe, step, trained
from tests.contract.ledgers import BAD, GOOD, RECIPE, Ledger, fake_ledger, finalize, ledger, postgres_ledger

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]

SHARE = 0.5
HOLDS_OUT = Recipe(name="combined", gate=Gate(held_out=SHARE))


async def conversation(ledger: Ledger, held_out: bool) -> list[TurnRecord]:
    """Two turns of a session that is held out, or not."""
    await ledger.learn_by(HOLDS_OUT)
    for number in range(200):  # each session is held out or not with even odds
        turns = ledger.talk("one", "two", session=f"s{number}")
        session = await ledger.insert(turns[0])
        if is_held_out("default", session, SHARE) is held_out:
            await ledger.insert(turns[1])
            return turns
    raise AssertionError("200 sessions on the same side")


async def test_a_held_out_turn_is_judged_and_shown_and_gives_no_fresh_sample(ledger: Ledger) -> None:
    turn, other = await conversation(ledger, held_out=True)
    await finalize(ledger, turn, GOOD)
    await finalize(ledger, other, BAD)
    for judged in (turn, other):
        assert [state for state, _ in ledger.samples(judged.turn_id)] == [SampleState.HELD_OUT]
    assert await ledger.outcome_of(turn) == (TurnOutcome.HELD_OUT, "held out: verdict +1")


async def test_a_session_that_is_not_held_out_is_trained_as_before(ledger: Ledger) -> None:
    turn, _ = await conversation(ledger, held_out=False)
    await finalize(ledger, turn, GOOD)
    assert ledger.samples(turn.turn_id) == [(SampleState.FRESH, 1.0)]
    assert await ledger.outcome_of(turn) == (TurnOutcome.SAMPLED, "verdict +1")


async def test_feedback_revises_a_held_out_turn_and_it_stays_held_out(ledger: Ledger) -> None:
    turn, _ = await conversation(ledger, held_out=True)
    await finalize(ledger, turn, GOOD)
    given = await ledger.give(turn.turn_id, -1.0, None)
    opened = await ledger.judgements.revise(turn.turn_id, None, b"e", "hint")
    await ledger.judgements.finalize(opened.id, BAD, [given])
    states = [state for state, _ in ledger.samples(turn.turn_id)]
    assert states[-1] is SampleState.HELD_OUT
    assert SampleState.FRESH not in states
    assert (await ledger.outcome_of(turn))[1] == "held out: verdict -1"


async def test_a_turn_that_was_trained_before_the_share_was_set_is_never_held_out(postgres_ledger: Ledger) -> None:
    ledger = postgres_ledger
    turn, other = await conversation(ledger, held_out=True)
    await ledger.learn_by(RECIPE)
    await finalize(ledger, turn, GOOD)
    ledger.train(turn.turn_id, 1)
    await ledger.learn_by(HOLDS_OUT)
    given = await ledger.give(turn.turn_id, -1.0, None)
    opened = await ledger.judgements.revise(turn.turn_id, None, b"e", "hint")
    await ledger.judgements.finalize(opened.id, BAD, [given])
    assert [state for state, _ in ledger.samples(turn.turn_id)] == [SampleState.TRAINED, SampleState.FRESH]
    await finalize(ledger, other, GOOD)
    assert [state for state, _ in ledger.samples(other.turn_id)] == [SampleState.HELD_OUT]


async def test_a_step_does_not_take_a_held_out_sample(ledger: Ledger) -> None:
    turn, _ = await conversation(ledger, held_out=True)
    await finalize(ledger, turn, GOOD)
    ledger.claim(turn.turn_id)
    assert [state for state, _ in ledger.samples(turn.turn_id)] == [SampleState.HELD_OUT]


async def test_a_share_that_leaves_no_batch_is_said(postgres_ledger: Ledger, database: Database) -> None:
    async def status() -> str:
        return (await database.run(lambda connection: read_status(connection, "default"))).reason

    turn, other = await conversation(postgres_ledger, held_out=True)
    await postgres_ledger.learn_by(HOLDS_OUT.model_copy(update={"train": Train(batch_samples=2)}))
    await finalize(postgres_ledger, turn, GOOD)
    assert "held out" not in await status()
    await finalize(postgres_ledger, other, BAD)
    said = "0 of 2 samples; 2 since the last step are held out with their sessions: lower gate.held_out"
    assert (await status()).startswith(said)


async def test_a_share_that_leaves_no_batch_is_said_after_a_step_too(
    postgres_learning: PostgresLearning, database: Database
) -> None:
    learning = postgres_learning

    async def status() -> str:
        return (await database.run(lambda connection: read_status(connection, "default"))).reason

    async def hold_out(count: int) -> None:
        for sample in await learning.add_samples(count):
            await learning.execute("UPDATE samples SET state = 'held_out' WHERE id = %s", sample)

    await hold_out(4)
    await step(learning, 1)
    assert "held out" not in await status()  # those of before the step
    await hold_out(3)
    assert "held out" not in await status()  # less than a batch
    await hold_out(1)
    assert "0 of 4 samples; 4 since the last step are held out" in await status()
    group = uuid4()
    insert = (
        "INSERT INTO rollout_groups (id, policy, environment, task, size, state) VALUES (%s, %s, 'e', 't', 2, 'open')"
    )
    await learning.execute(insert, group, POLICY)
    await learning.execute("UPDATE samples SET rollout_group_id = %s WHERE state = 'held_out'", group)
    assert "held out" not in await status()  # a rollout group is no batch of chats, and no batch of groups
    await learning.set_recipe(recipe(batch_groups=1))
    assert "; rollout groups held out since the last step: 1: lower gate.held_out" in await status()
    await step(learning, 2)
    assert "held out" not in await status()


async def test_blamed_turns_are_compared_though_praised_ones_are_newer(
    postgres_learning: PostgresLearning, database: Database
) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe().model_copy(update={"gate": Gate(held_out=SHARE)}))
    samples = await learning.add_samples(44)
    await learning.execute("UPDATE samples SET state = 'held_out'")

    async def blame(first: int) -> None:
        blamed = "verdict = CASE WHEN s.id = ANY(%s) THEN -1 ELSE 1 END"
        of_samples = "FROM samples s WHERE s.judgement_id = judgements.id"
        await learning.execute(f"UPDATE judgements SET {blamed} {of_samples}", samples[:first])

    async def read() -> list[BatchSample]:
        gate, later = Gate(held_out=SHARE, replay_turns=32), datetime.now(UTC) + timedelta(minutes=1)
        return await database.run(
            lambda connection: read_held_out(connection, ConversationCache(), POLICY, later, gate)
        )

    await blame(20)
    chosen = await read()
    assert [sample.sample_id for sample in chosen] == [*samples[4:20], *samples[28:]]
    assert [sample.reward for sample in chosen] == [-1.0] * 16 + [1.0] * 16
    sessions = await learning.rows("SELECT DISTINCT session_id FROM turns")
    assert {sample.unit for sample in chosen} <= {row["session_id"] for row in sessions}
    await blame(3)  # praised ones take the places that are left
    assert [sample.sample_id for sample in await read()] == [*samples[:3], *samples[15:]]


async def test_what_a_replay_found_is_kept_with_both_versions(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe().model_copy(update={"gate": Gate(held_out=0.001)}))
    await learning.add_samples(2)
    await learning.execute("UPDATE samples SET state = 'held_out'")

    async def claimed(n: int) -> StepBatch:
        await learning.add_samples(4)
        assert (await learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
        return await learning.steps.batch(POLICY, n)

    first = await claimed(1)
    assert first.parent_scores == {}
    one, other = (turn.sample_id for turn in first.held_out)
    scores = [HeldOutScore(1, -2.0, -1.5, sample=one), HeldOutScore(1, -3.0, -3.25, sample=other)]
    assert await learning.steps.commit(first, replace(trained(first), held_out=scores)) is StepState.CANDIDATE
    await learning.gate.reject(POLICY, 1, "too far")
    second = await claimed(2)  # from the same parent
    assert second.parent_scores == {one: -2.0, other: -3.0}
    scores = [HeldOutScore(1, -2.0, -1.75, sample=one)]
    await commit(learning, second, replace(trained(second), held_out=scores))
    assert (await claimed(3)).parent_scores == {one: -1.75}
