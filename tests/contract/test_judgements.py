"""Judging, closing and sweep, in memory and in PostgreSQL alike."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from clawloop.core.contracts.sessions import FeedbackEffect, TurnResult
from clawloop.core.contracts.training import BatchSample, HeldOutScore, SampleState, StepBatch, StepState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome, TurnRecord
from clawloop.core.errors import StoreUnavailable
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.core.judging.hints import NOT_ASKED
from clawloop.core.judging.records import (
    DIRECT,
    VOTES,
    Ballot,
    FinalizedJudgement,
    Relation,
    TurnDecision,
)
from clawloop.core.judging.voting import HintVote, Verdict, Vote
from clawloop.core.recipes.recipe import Gate, Recipe, Train
from clawloop.core.samples.decision import FallbackSample, is_held_out
from db.database import Database
from db.training.gate_checks import read_held_out
from db.training.status import read_status
from db.turns.read import ConversationCache
from tests.contract.learning import POLICY, PostgresLearning, commit, recipe, step, trained
from tests.contract.ledgers import (
    BAD,
    GOOD,
    RECIPE,
    TIE,
    Ledger,
    fake_ledger,
    finalize,
    ledger,
    postgres_ledger,
    related,
)

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]


# Judging, closing and sweep, in memory and in PostgreSQL alike.

NOW, LATER = timedelta(0), timedelta(hours=1)


async def test_a_turns_context_skips_side_turns(ledger: Ledger) -> None:
    first, second, third = ledger.talk("one", "two", "three")
    side = replace(
        second, turn_id=new_turn_id(), kind=TurnKind.SIDE, response={"role": "assistant", "content": "A title"}
    )
    await ledger.insert(first, side, third)
    await ledger.insert(second)
    context = await ledger.judgements.load_context(second.turn_id)
    assert context is not None
    assert (context.number, context.follows, context.followed_by) == (2, first.turn_id, [third.turn_id])
    assert context.overtaken_by == {third.turn_id}
    assert context.current is None
    assert [candidate.turn_id for candidate in context.candidates] == [first.turn_id]
    assert await ledger.judgements.load_context(side.turn_id) is None
    assert await ledger.judgements.load_context(new_turn_id()) is None


async def test_a_direct_vote_is_stored_once_beside_the_sampled_votes(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert opened.direct is None
    said: dict[Vote, float] = {1: -0.25, 0: -9999.0, -1: -1.5}
    await ledger.judgements.store_direct_vote(opened.id, said, 1)
    await ledger.judgements.store_direct_vote(opened.id, {1: -2.0, 0: -1.0, -1: -1.0}, 0)
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert (again.direct, again.votes) == (said, {})


async def test_answers_are_stored_once_and_read_again(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert (opened.votes, opened.hints, opened.recipe.name) == ({}, {}, "combined")
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    await ledger.judgements.store_votes(opened.id, [(0, "-1", -1)])  # the first one counts
    await ledger.judgements.store_votes(opened.id, [(2, "?", None)])
    hint = HintVote(True, "In Python, please.")
    await ledger.judgements.store_hints(opened.id, "hint", [(1, "x", hint)])
    await ledger.judgements.store_hints(opened.id, "hint+1", [(0, "y", HintVote(False, None))])
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert (again.id, again.votes, again.hints) == (opened.id, {0: 1, 2: None}, {1: hint})
    other = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint+1")
    assert list(other.hints) == [0]


async def test_a_vote_after_the_verdict_is_not_stored(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    others: list[tuple[Vote | None, ...]] = [(None, None, None), (-1, None, None), (1, 1, None), (None, None, 1)]
    for scores in others:
        with pytest.raises(StoreUnavailable):
            await ledger.judgements.finalize(opened.id, replace(GOOD, ballot=Ballot(VOTES, scores)), [])
    await ledger.judgements.finalize(opened.id, replace(GOOD, ballot=Ballot(VOTES, (1, None, None))), [])
    await ledger.judgements.store_votes(opened.id, [(1, "-1", -1)])
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert again.votes == {0: 1}
    # A closing asks for a direct vote where the others cancel out.
    await ledger.judgements.store_direct_vote(opened.id, {1: -0.1, 0: -3.0, -1: -4.0}, 1)
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert again.direct is not None


async def test_a_direct_vote_is_not_stored_after_a_verdict_without_one(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    none = FinalizedJudgement(
        Verdict(None, None, None, "none"), NOT_ASKED, None, None, (), TurnOutcome.UNJUDGED, "none"
    )
    await ledger.judgements.finalize(opened.id, replace(none, ballot=Ballot(DIRECT, (None,))), [])
    said: dict[Vote, float] = {1: -0.1, 0: -3.0, -1: -4.0}
    assert (await ledger.judgements.store_direct_vote(opened.id, said, 1)).direct is None
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert again.direct is None


async def test_a_finalized_judgement_is_current_and_has_a_sample(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, GOOD, [])
    context = await ledger.judgements.load_context(first.turn_id)
    assert context is not None
    assert context.current is not None
    held = context.current
    assert (held.revision, held.outcome, held.verdict, held.next_turn_id) == (0, TurnOutcome.SAMPLED, 1, second.turn_id)
    assert await ledger.outcome_of(first) == (TurnOutcome.SAMPLED, "verdict +1")
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, 1.0)]


async def test_feedback_amends_a_judgement_or_adds_one_if_its_sample_is_taken(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, GOOD, [])
    given = await ledger.give(first.turn_id, -1.0, None)
    amended = await ledger.judgements.revise(first.turn_id, second.turn_id, b"f", "hint")
    assert amended.id == opened.id
    await ledger.judgements.finalize(amended.id, TIE, [given])
    context = await ledger.judgements.load_context(first.turn_id)
    assert context is not None
    assert [one.applied for one in context.feedback] == [True]
    assert [state for state, _ in ledger.samples(first.turn_id)] == [SampleState.SUPERSEDED]
    await ledger.judgements.finalize(amended.id, GOOD, [given])
    ledger.claim(first.turn_id)
    feedback_ids = [given, await ledger.give(first.turn_id, -1.0, "no")]
    with pytest.raises(StoreUnavailable):
        await ledger.judgements.finalize(opened.id, BAD, feedback_ids)  # a step took it meanwhile
    further = await ledger.judgements.revise(first.turn_id, None, b"g", "hint")
    assert further.id != opened.id
    await ledger.judgements.finalize(further.id, BAD, feedback_ids)
    assert ledger.samples(first.turn_id) == [(SampleState.CLAIMED, 1.0), (SampleState.FRESH, -1.0)]


async def test_a_judgement_without_an_applied_rating_is_not_finalized(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    slow = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    given = await ledger.give(first.turn_id, -1.0, None)
    quick = await ledger.judgements.revise(first.turn_id, second.turn_id, b"f", "hint")
    await ledger.judgements.finalize(quick.id, BAD, [given])
    with pytest.raises(StoreUnavailable):
        await ledger.judgements.finalize(slow.id, GOOD, [])
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, -1.0)]
    assert await ledger.outcome_of(first) == (TurnOutcome.SAMPLED, "verdict -1")


async def test_a_further_revision_replaces_a_sample_that_no_step_has(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, GOOD, [])
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint", revision=1)
    same = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint", revision=1)
    assert again.id == same.id != opened.id
    await ledger.judgements.finalize(again.id, BAD, [])
    assert ledger.samples(first.turn_id) == [(SampleState.SUPERSEDED, 1.0), (SampleState.FRESH, -1.0)]
    ledger.claim(first.turn_id)
    late = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint", revision=2)
    await ledger.judgements.finalize(late.id, GOOD, [])
    assert [state for state, _ in ledger.samples(first.turn_id)] == [SampleState.SUPERSEDED, SampleState.CLAIMED]
    assert await ledger.outcome_of(first) == (TurnOutcome.SAMPLED, "verdict -1")


def trained_turn(turn: TurnRecord, *, number: int, verdict: int, step: int) -> TurnResult:
    return TurnResult(
        turn_id=turn.turn_id,
        number=number,
        kind=TurnKind.MAIN,
        outcome=TurnOutcome.TRAINED,
        verdict=verdict,
        sample=True,
        step=step,
        why=f"trained in step {step}",
    )


async def test_the_newest_trained_turns_are_listed_with_their_steps(ledger: Ledger) -> None:
    turns = ledger.talk("one", "two", "three", "four")
    other = ledger.talk("one", session="other")
    side = replace(turns[0], turn_id=new_turn_id(), kind=TurnKind.SIDE)
    session = await ledger.insert(side, *turns)
    await ledger.insert(*other)
    for turn, finalized in ((turns[0], GOOD), (turns[1], BAD), (turns[2], GOOD), (other[0], GOOD)):
        await finalize(ledger, turn, finalized)
    assert await ledger.judgements.trained_turns(session, 9) == []
    ledger.train(turns[1].turn_id, 2)
    ledger.train(turns[0].turn_id, 5)
    ledger.train(other[0].turn_id, 8)
    ledger.claim(turns[2].turn_id)
    first = trained_turn(turns[0], number=1, verdict=1, step=5)
    second = trained_turn(turns[1], number=2, verdict=-1, step=2)
    assert await ledger.judgements.trained_turns(session, 9) == [first, second]
    assert await ledger.judgements.trained_turns(session, 1) == [second]
    ledger.roll_back(turns[0].turn_id)
    rolled_back = {"outcome": TurnOutcome.ROLLED_BACK, "why": "trained in step 5, rolled back to 0"}
    first = first.model_copy(update=rolled_back)
    assert await ledger.judgements.trained_turns(session, 9) == [first, second]


async def test_a_first_close_loads_all_turns_and_later_ones_only_waiting_turns(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    session = await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, TIE, [])
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert (seen.first_close, seen.at_least_one, seen.main_turns) == (True, True, 2)
    judged, last = seen.turns
    assert (judged.number, judged.judged, judged.expected, judged.trainable, judged.samples) == (1, True, 0.0, True, 0)
    assert (last.last, last.judged, last.outcome, last.followed_by) == (True, False, TurnOutcome.WAITING, [])
    decisions = {
        second.turn_id: TurnDecision(TurnOutcome.NO_FEEDBACK, "nothing followed"),
        first.turn_id: TurnDecision(TurnOutcome.UNJUDGED, "x"),
    }
    fallback = FallbackSample(first.turn_id, 0.5, (), "at least one")
    await ledger.closing.close(session, "idle", decisions, fallback)
    assert await ledger.outcome_of(first) == (TurnOutcome.SAMPLED, "at least one")
    assert await ledger.outcome_of(second) == (TurnOutcome.NO_FEEDBACK, "nothing followed")
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, 0.5)]
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert (seen.first_close, seen.turns) == (False, [])
    assert await ledger.closing.load(SessionId(new_turn_id())) is None


async def test_a_closing_never_samples_a_turn_that_was_erased_meanwhile(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    session = await ledger.insert(first, second)
    await finalize(ledger, first, TIE)
    ledger.erase(first.turn_id)
    fallback = FallbackSample(first.turn_id, 0.5, (), "at least one")
    await ledger.closing.close(session, "idle", {}, fallback)
    assert (await ledger.outcome_of(first))[0] is TurnOutcome.ERASED
    assert ledger.samples(first.turn_id) == []


async def test_a_waiting_turn_keeps_its_session_open(ledger: Ledger) -> None:
    (first,) = ledger.talk("one")
    session = await ledger.insert(first)
    await ledger.closing.close(session, "idle", {})
    assert [facts.session_id for facts in await ledger.sweep.sessions_left_open(NOW, 9)] == [session]
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert [turn.turn_id for turn in seen.turns] == [first.turn_id]
    await ledger.closing.close(session, "idle", {first.turn_id: TurnDecision(TurnOutcome.NO_FEEDBACK, "no")})
    assert await ledger.sweep.sessions_left_open(NOW, 9) == []


async def test_what_was_not_announced_is_found_in_order_until_it_is(ledger: Ledger) -> None:
    turns = ledger.talk("one", "two", "three")
    side = replace(turns[0], turn_id=new_turn_id(), kind=TurnKind.SIDE)
    await ledger.insert(turns[1], turns[0], side, turns[2])
    missed = await ledger.sweep.pending_turns(NOW, 2)
    assert [told.turn_id for _, told in missed] == [turn.turn_id for turn in turns[:2]]
    assert await ledger.sweep.pending_turns(LATER, 9) == []
    await ledger.sweep.mark_notified([told.turn_id for _, told in missed], timedelta(0))
    assert [told.turn_id for _, told in await ledger.sweep.pending_turns(NOW, 9)] == [turns[2].turn_id]


async def test_feedback_nobody_was_told_of_is_found_until_somebody_is(ledger: Ledger) -> None:
    (first,) = ledger.talk("one")
    await ledger.insert(first)
    given = await ledger.give(first.turn_id, 1.0, None)
    ((facts, told),) = await ledger.sweep.pending_feedback(NOW, 9)
    assert (facts.policy, told.feedback_id, told.turn_id) == ("default", given, first.turn_id)
    assert await ledger.sweep.pending_feedback(LATER, 9) == []
    await ledger.sweep.mark_feedback_notified([given], timedelta(0))
    assert await ledger.sweep.pending_feedback(NOW, 9) == []


async def responses(ledger: Ledger, n: int) -> list[TurnRecord]:
    """The responses to one prompt, of a policy that compares them."""
    await ledger.learn_by(
        Recipe.model_validate(
            {
                "name": "groups",
                "signal": {"hints": False, "reward": "group"},
                "train": {"advantage": {"teacher_weight": 0.0}},
            }
        )
    )
    (first,) = ledger.talk("one")
    others = [
        replace(first, turn_id=new_turn_id(), choice=choice, response={"role": "assistant", "content": f"c{choice}"})
        for choice in range(1, n)
    ]
    return [replace(turn, group_id=first.turn_id) for turn in (first, *others)]


async def test_the_mean_verdict_before_is_subtracted_and_each_judgement_counts_once(ledger: Ledger) -> None:
    turns = ledger.talk("one", "two", "three", "four")
    await ledger.insert(*turns)
    await finalize(ledger, turns[0], related(GOOD, Relation.MEAN, 1.0))
    assert await ledger.samples_of(turns[0]) == [1.0]  # the first is not changed
    await finalize(ledger, turns[1], related(TIE, Relation.MEAN, 0.0))  # no opinion, and none in the mean
    assert (await ledger.outcome_of(turns[1]))[0] is TurnOutcome.UNDECIDED
    for _ in range(2):
        await finalize(ledger, turns[2], related(BAD, Relation.MEAN, -1.0))
        assert await ledger.samples_of(turns[2]) == [-2.0]
    await finalize(ledger, turns[3], related(GOOD, Relation.MEAN, 1.0))
    assert await ledger.samples_of(turns[3]) == [1.0]
    await finalize(ledger, turns[2], related(GOOD, Relation.MEAN, 1.0))  # judged again: the mean before is +1
    assert await ledger.outcome_of(turns[2]) == (TurnOutcome.UNDECIDED, "verdict +1; mean before +1.00")
    assert [state for state, _ in ledger.samples(turns[2].turn_id)] == [SampleState.SUPERSEDED]


async def test_a_group_is_sampled_when_its_last_verdict_comes(ledger: Ledger) -> None:
    group = await responses(ledger, 4)
    await ledger.insert(*group)
    ends = [(GOOD, 1.0), (BAD, -1.0), (GOOD, 1.0), (TIE, 0.0)]
    for turn, (finalized, reward) in list(zip(group, ends, strict=True))[:3]:
        await finalize(ledger, turn, related(finalized, Relation.GROUP, reward))
    assert await ledger.outcome_of(group[0]) == (
        TurnOutcome.UNDECIDED,
        "waits for its group: 3 of 4 have a verdict (verdict +1)",
    )
    assert [ledger.samples(turn.turn_id) for turn in group] == [[]] * 4
    await finalize(ledger, group[3], related(TIE, Relation.GROUP, 0.0))
    assert [round((await ledger.samples_of(turn))[0], 2) for turn in group] == [0.90, -1.51, 0.90, -0.30]
    assert await ledger.outcome_of(group[3]) == (TurnOutcome.SAMPLED, "-0.30 in its group of 4 (vote tie)")


async def test_a_group_that_agrees_gives_no_sample(ledger: Ledger) -> None:
    group = await responses(ledger, 2)
    await ledger.insert(*group)
    for turn in group:
        await finalize(ledger, turn, related(BAD, Relation.GROUP, -1.0))
    assert [ledger.samples(turn.turn_id) for turn in group] == [[], []]
    assert await ledger.outcome_of(group[0]) == (TurnOutcome.UNDECIDED, "group agrees (verdict -1)")


async def test_closing_finalizes_waiting_groups(ledger: Ledger) -> None:
    group = await responses(ledger, 3)
    session = await ledger.insert(*group)
    await finalize(ledger, group[1], related(BAD, Relation.GROUP, -1.0))
    seen = await ledger.closing.load(session)
    assert seen is not None
    assert seen.has_related_rewards
    decisions, _ = await ledger.closing.finalize_related(session)
    why = "the only verdict in its group: verdict -1"
    assert decisions == {group[1].turn_id: TurnDecision(TurnOutcome.SAMPLED, why, -1.0)}
    await ledger.closing.close(session, "idle", {})
    assert await ledger.closing.finalize_related(session) == ({}, None)
    # A later rating is compared with the verdict there is.
    await finalize(ledger, group[0], related(GOOD, Relation.GROUP, 1.0))
    assert [(await ledger.samples_of(turn)) for turn in group] == [[1.0], [-1.0], []]


async def test_a_member_whose_sample_a_step_has_stays_unchanged(ledger: Ledger) -> None:
    group = await responses(ledger, 3)
    session = await ledger.insert(*group)
    await finalize(ledger, group[0], related(GOOD, Relation.GROUP, 1.0))
    await finalize(ledger, group[1], related(BAD, Relation.GROUP, -1.0))
    await ledger.closing.finalize_related(session)
    await ledger.closing.close(session, "idle", {})
    ledger.claim(group[0].turn_id)
    await finalize(ledger, group[2], related(BAD, Relation.GROUP, -1.0))
    assert ledger.samples(group[0].turn_id) == [(SampleState.CLAIMED, 1.0)]
    assert [round((await ledger.samples_of(turn))[0], 2) for turn in group[1:]] == [-0.71, -0.71]


# Rewards by the outcome of a session's task, in memory and in PostgreSQL alike.

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


# Held-out sessions and groups: judged, shown and never trained, in memory and in PostgreSQL.

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
    said = (
        "0 of 2 samples for the next step; 2 since the last step are held out with their sessions: lower gate.held_out"
    )
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
    assert "0 of 4 samples for the next step; 4 since the last step are held out" in await status()
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
    await learning.set_recipe(recipe().model_copy(update={"gate": Gate(held_out=1e-9)}))
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
