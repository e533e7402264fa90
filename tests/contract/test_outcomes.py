"""Rewards by the outcome of a session's task, in memory and in PostgreSQL alike."""

from __future__ import annotations

from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import TurnOutcome, TurnRecord
from clawloop.core.ids import SessionId
from clawloop.core.judging.records import Relation, TurnDecision
from clawloop.core.recipes.recipe import Recipe
from tests.contract.ledgers import BAD, GOOD, TIE, Ledger, fake_ledger, finalize, ledger, postgres_ledger, related

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]

BY_OUTCOME = Recipe.model_validate(
    {
        "name": "outcomes",
        "signal": {"hints": False, "reward": "outcome_process"},
        "train": {"advantage": {"teacher_weight": 0.0}},
    }
)


async def judged(ledger: Ledger) -> tuple[SessionId, list[TurnRecord]]:
    """Three turns with process +1/3, 0 and -1, and one that nothing followed."""
    await ledger.learn_by(BY_OUTCOME)
    turns = ledger.talk("one", "two", "three", "four")
    session = await ledger.insert(*turns)
    for turn, end, process in zip(turns, (GOOD, TIE, BAD), (1 / 3, 0.0, -1.0), strict=False):
        await finalize(ledger, turn, related(end, Relation.OUTCOME, process))
    return session, turns


async def close(ledger: Ledger, session: SessionId) -> None:
    await ledger.closing.finalize_related(session)
    await ledger.closing.close(session, "idle", {})


async def test_each_turns_reward_is_the_outcome_and_its_own_votes(ledger: Ledger) -> None:
    session, turns = await judged(ledger)
    assert await ledger.outcome_of(turns[0]) == (TurnOutcome.UNDECIDED, "waits for its session's outcome (verdict +1)")
    assert await ledger.give_outcome("s", 1) is FeedbackEffect.AMENDS
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert (seen.has_related_rewards, seen.learns_by_outcome) == (True, True)
    await close(ledger, session)
    assert [[round(r, 2) for r in await ledger.samples_of(turn)] for turn in turns] == [[1.33], [1.0], [], []]
    assert await ledger.outcome_of(turns[0]) == (TurnOutcome.SAMPLED, "outcome +1, process +0.33 (verdict +1)")
    assert await ledger.outcome_of(turns[2]) == (TurnOutcome.UNDECIDED, "outcome +1, process -1.00 (verdict -1)")


async def test_without_an_outcome_the_votes_alone_count(ledger: Ledger) -> None:
    session, turns = await judged(ledger)
    await close(ledger, session)
    assert [[round(r, 2) for r in await ledger.samples_of(turn)] for turn in turns] == [[0.33], [], [-1.0], []]
    assert await ledger.outcome_of(turns[1]) == (TurnOutcome.UNDECIDED, "process +0.00, no outcome (vote tie)")


async def test_a_late_outcome_changes_samples_that_no_step_has(ledger: Ledger) -> None:
    session, turns = await judged(ledger)
    await close(ledger, session)
    ledger.claim(turns[0].turn_id)
    assert await ledger.give_outcome("s", -1) is FeedbackEffect.AMENDS
    assert ledger.samples(turns[0].turn_id) == [(SampleState.CLAIMED, 1 / 3)]
    assert [await ledger.samples_of(turn) for turn in turns[1:]] == [[-1.0], [-2.0], []]
    assert await ledger.give_outcome("another", 1) is None


async def test_other_recipes_only_record_the_outcome(ledger: Ledger) -> None:
    turns = ledger.talk("one", "two")
    session = await ledger.insert(*turns)
    await finalize(ledger, turns[0], GOOD)
    assert await ledger.give_outcome("s", -1) is FeedbackEffect.RECORDED
    await close(ledger, session)
    assert await ledger.samples_of(turns[0]) == [1.0]


async def test_a_turn_judged_after_the_close_gets_the_outcome_at_once(ledger: Ledger) -> None:
    session, turns = await judged(ledger)
    await ledger.give_outcome("s", 1)
    await close(ledger, session)
    await finalize(ledger, turns[3], related(GOOD, Relation.OUTCOME, 1.0))
    assert await ledger.samples_of(turns[3]) == [2.0]


async def test_a_late_turn_gets_the_outcome_when_its_session_closes_again(ledger: Ledger) -> None:
    await ledger.learn_by(BY_OUTCOME)
    late, last = ledger.talk("one", "two")
    session = await ledger.insert(last)
    await ledger.give_outcome("s", 1)
    await ledger.closing.close(session, "idle", {last.turn_id: TurnDecision(TurnOutcome.NO_FEEDBACK, "")})
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert seen.closed
    await ledger.insert(late)
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert not seen.closed
    await finalize(ledger, late, related(GOOD, Relation.OUTCOME, 1 / 3))
    assert await ledger.outcome_of(late) == (TurnOutcome.UNDECIDED, "waits for its session's outcome (verdict +1)")
    await ledger.closing.finalize_related(session)
    await ledger.closing.close(session, "came late", {})
    assert [round(reward, 2) for reward in await ledger.samples_of(late)] == [1.33]
    assert await ledger.give_outcome("s", -1) is FeedbackEffect.AMENDS
    assert [round(reward, 2) for reward in await ledger.samples_of(late)] == [-0.67]
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert seen.closed
