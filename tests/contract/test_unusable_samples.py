"""Samples that cannot be trained expire or are dropped; the others of their batch are trained."""

from __future__ import annotations

import pytest

from clawloop.core.contracts.training import SampleState, StepState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecordUnusable
from db.content import bytes_to_logprobs
from db.training import samples
from db.training.steps import PostgresStepStore
from tests.contract.learning import POLICY, PostgresLearning, commit, recipe, trained


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE turns SET logprobs = NULL", "log-probs are unknown"),
        ("UPDATE turns SET response_ids = NULL, logprobs = NULL", "0 response ids"),
        ("UPDATE turns SET prompt_ids = NULL, prompt_shared = NULL", "0 prompt and"),
        ("""UPDATE turns SET sampling = '{"top_p": 1}'""", "temperature None"),
        ("UPDATE turns SET outcome = 'erased'", "its turn was erased"),
    ],
)
async def test_an_unusable_sample_expires_and_the_claim_continues(
    postgres_learning: PostgresLearning, damage: str, fault: str
) -> None:
    bad, *_ = await postgres_learning.add_samples(5)
    turn = (await postgres_learning.rows("SELECT turn_id FROM samples WHERE id = %s", bad))[0]["turn_id"]
    await postgres_learning.execute(f"{damage} WHERE id = %s", turn)
    claim = await PostgresStepStore(postgres_learning.database).claim(POLICY, 1)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 4)
    state, outcome, _ = await postgres_learning.sample_result(bad)
    reason = (await postgres_learning.rows("SELECT reason FROM samples WHERE id = %s", bad))[0]["reason"]
    assert state is SampleState.EXPIRED
    assert outcome is (TurnOutcome.ERASED if "erased" in fault else TurnOutcome.EXPIRED)
    assert fault in reason
    assert "erased" in fault or str(turn) in reason


async def test_a_sample_erased_after_the_claim_is_dropped(postgres_learning: PostgresLearning) -> None:
    erased, *_ = await postgres_learning.add_samples(4)
    store = postgres_learning.steps
    await store.claim(POLICY, 1)
    await postgres_learning.execute(
        "UPDATE turns SET outcome = 'erased', outcome_detail = 'asked for' WHERE id ="
        " (SELECT turn_id FROM samples WHERE id = %s)",
        erased,
    )
    batch = await store.batch(POLICY, 1)
    assert len(batch.samples) == 3
    assert await commit(postgres_learning, batch, trained(batch)) is StepState.COMMITTED
    assert await postgres_learning.sample_result(erased) == (SampleState.EXPIRED, TurnOutcome.ERASED, "asked for")


async def test_a_sample_damaged_after_the_claim_is_dropped_and_the_others_are_trained(
    postgres_learning: PostgresLearning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CHECK refuses log-probs of a wrong length, so only damage on disk can make them; so decoding fails here."""
    damaged, *_ = await postgres_learning.add_samples(4)
    await postgres_learning.steps.claim(POLICY, 1)
    faults = iter([RecordUnusable("3 bytes of log-probs for 2 tokens")])

    def decode(stored: bytes, count: int) -> list[float]:
        if (fault := next(faults, None)) is not None:
            raise fault
        return bytes_to_logprobs(stored, count)

    monkeypatch.setattr(samples, "bytes_to_logprobs", decode)
    batch = await postgres_learning.steps.batch(POLICY, 1)
    assert len(batch.samples) == 3
    assert damaged not in {sample.sample_id for sample in batch.samples}
    assert await commit(postgres_learning, batch, trained(batch)) is StepState.COMMITTED


async def test_a_prompt_whose_parent_lost_tokens_is_detected(postgres_learning: PostgresLearning) -> None:
    (sample, *_) = await postgres_learning.add_samples(5)
    await postgres_learning.execute(
        "UPDATE turns SET prompt_shared = 9, parent_turn_id = (SELECT min(id::text)::uuid FROM turns) WHERE id ="
        " (SELECT turn_id FROM samples ORDER BY id DESC LIMIT 1)"
    )
    await PostgresStepStore(postgres_learning.database).claim(POLICY, 1)
    assert (await postgres_learning.sample_result(sample))[0] is SampleState.CLAIMED
    await postgres_learning.steps.abandon(POLICY, 1, "to claim the last one")
    await postgres_learning.set_recipe(recipe(batch_samples=5))
    claim = await PostgresStepStore(postgres_learning.database).claim(POLICY, 2)
    assert claim.state is None
    (row,) = await postgres_learning.rows("SELECT reason FROM samples WHERE state = 'expired'")
    assert "its prompt is 9 tokens of its parent's and 3 more, but 8 are there" in row["reason"]
