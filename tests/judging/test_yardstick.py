"""Lessons that leave the prompt once they are learned, on PostgreSQL; the engine and the trainer are scripted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.practice import Practised
from clawloop.core.contracts.lessons import Correction, Finding, Lesson, LessonSource, LessonState
from clawloop.core.contracts.training import StepState, YardstickScore
from clawloop.core.contracts.turns import Message, TurnKind, TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.lessons.prompt import LEAD_IN
from clawloop.core.lessons.yardstick import MOST_TRIED, NEEDED
from clawloop.core.recipes.lessons import Lessons
from clawloop.operations.lessons import LessonOperations
from db.erasure import PostgresErasureStore
from db.invariants import violations
from db.lessons.ledger import add_correction
from db.lessons.practice import PostgresPracticeStore
from db.lessons.yardstick import MOST_MEASURED
from db.serving.engines import add_engine
from db.serving.publishing import PostgresPublishingStore
from db.training.gate import PostgresGateStore
from db.training.operators import PostgresTrainingStore
from db.training.policies import lock_policy
from db.training.recipes import set_recipe as change_recipe
from db.training.steps import PostgresStepStore
from tests.contract.learning import trained
from tests.judging.conftest import Bench, set_recipe
from tests.judging.test_practice import BRIEF, POLITE, Gym, ids_of, practising
from tests.judging.test_practice import gym as gym

EFFECTS = (4.0, 5.0, 6.0, 5.0, 4.0, 6.0, 5.0, 5.0)


@pytest.fixture
async def retiring(gym: Gym) -> Gym:
    """The policy takes learned lessons out of the prompt; a person asked 16 times before the lesson."""
    await set_recipe(gym.bench, practising(lessons=Lessons(enabled=True, practice=True, retire=True)))
    await add_engine(gym.bench.database, "http://engine")
    await ask(gym, 16)
    return gym


async def ask(gym: Gym, times: int, session: str = "s") -> None:
    turns = gym.bench.conversation(*(f"request {n}" for n in range(times)), session=session)
    await gym.bench.insert(*turns)
    gym.bench.execute("UPDATE turns SET outcome = 'no_feedback' WHERE outcome = 'waiting'")


async def learn(gym: Gym, n: int, lacks: float) -> None:
    """Train version n on a batch of practice, and make it active; it lacks this share of the lessons' effect."""
    database = gym.bench.database
    steps, gate, publishing = (
        PostgresStepStore(database),
        PostgresGateStore(database),
        PostgresPublishingStore(database),
    )
    while (await gym.practise()).more:
        pass
    assert (await steps.claim("default", n)).state is StepState.CLAIMED
    batch = await steps.batch("default", n)
    scores = []
    for place, reply in enumerate(batch.yardstick):
        effect = EFFECTS[place % NEEDED]
        new = {"taught": -10.0, "plain": -10.0 - effect} if reply.new else {}
        scores.append(YardstickScore(reply.plain.sample_id, -10.0 - lacks * effect, **new))
    done = replace(trained(batch), yardstick=scores)
    assert await steps.commit(batch, done) is StepState.CANDIDATE
    assert (await gate.accept("default", n))[0] is StepState.COMMITTED
    [engine] = await publishing.engines()
    await publishing.loaded(engine.id, "default", n)
    [policy] = gym.bench.rows("SELECT epoch FROM policies")
    assert await publishing.activate("default", n, policy["epoch"])


async def lesson_of(gym: Gym, text: str = BRIEF) -> Lesson:
    return next(one for one in (await gym.lessons.book("default")).lessons if one.text == text)


async def learned(gym: Gym) -> Lesson:
    """The lesson after two versions that learned it."""
    await learn(gym, 1, 0.1)
    await learn(gym, 2, 0.15)
    return await lesson_of(gym)


async def complain(bench: Bench, said: str) -> None:
    [turn, *_] = bench.rows("SELECT id FROM turns WHERE kind = 'main' ORDER BY id")
    source = TurnId(turn["id"])
    [holds] = bench.conversation(said, session="complaint", kind=TurnKind.SIDE)
    await bench.insert(holds)

    async def correct(connection: AsyncConnection) -> None:
        await lock_policy(connection, "default")
        await add_correction(connection, "default", Correction(said, LessonSource.MESSAGE), source, holds.turn_id)

    await bench.database.run(correct)


# Measured -------------------------------------------------------------------------------------------------------------


async def test_a_new_lesson_is_measured_before_it_is_practised_and_by_other_requests(retiring: Gym) -> None:
    assert await retiring.practise() == Practised(policy="default", requests=NEEDED + 4, more=False)
    asked = retiring.engine.asked
    assert [one.measured is None for one in asked] == [False] * NEEDED + [True] * 4
    measured, practised = asked[:NEEDED], asked[NEEDED:]
    assert not {one.source.turn_id for one in measured} & {one.source.turn_id for one in practised}
    turns = retiring.bench.rows("SELECT outcome FROM turns WHERE lessons IS NOT NULL AND kind = 'practice'")
    assert turns == [{"outcome": TurnOutcome.HELD_OUT}] * NEEDED
    # The requests wait for a later set of lessons as well.
    await retiring.lessons.add("default", POLITE)
    assert (await retiring.practise()).requests == NEEDED
    again = retiring.engine.asked[NEEDED + 4 :]
    assert {one.source.turn_id for one in again} == {one.source.turn_id for one in measured}
    assert await violations(retiring.bench.database) == []


async def test_a_step_gets_the_replies_with_the_lesson_and_without_it(retiring: Gym) -> None:
    await retiring.lessons.add("default", POLITE)
    await retiring.practise()
    await retiring.practise()
    steps = PostgresStepStore(retiring.bench.database)
    await steps.claim("default", 1)
    replies = (await steps.batch("default", 1)).yardstick
    assert len(replies) == 2 * NEEDED
    newest = retiring.engine.asked[0].source.messages
    said = {"".join(map(chr, reply.plain.prompt_ids)) for reply in replies}
    for reply in replies:
        assert (reply.new, reply.taught.response_ids, reply.plain.response_ids) == (True, [4, 5, 6], [4, 5, 6])
    for text in (BRIEF, POLITE):  # without one lesson the other is there
        system: Message = {"role": "system", "content": f"You are a clock.\n\n{LEAD_IN}\n- {text}"}
        assert "".join(map(chr, ids_of([system, *newest]))) in said
    both: Message = {"role": "system", "content": f"You are a clock.\n\n{LEAD_IN}\n- {BRIEF}\n- {POLITE}"}
    assert ids_of([both, *newest]) in [list(reply.taught.prompt_ids) for reply in replies]


async def test_a_step_scores_all_new_lessons_and_four_of_the_others(retiring: Gym) -> None:
    for number in range(5):
        await retiring.lessons.add("default", f"Leave out the word number {number}.")
    await learn(retiring, 1, 0.5)
    measured = [one.yardstick for one in (await retiring.lessons.book("default")).lessons]
    assert [None if one is None else (one.finding, one.version) for one in measured] == [(Finding.HAS_EFFECT, 0)] * 6
    while (await retiring.practise()).more:
        pass
    steps = PostgresStepStore(retiring.bench.database)
    await steps.claim("default", 2)
    assert len((await steps.batch("default", 2)).yardstick) == MOST_MEASURED * NEEDED


async def test_practice_waits_for_requests_that_measure_and_not_for_those_that_cannot(retiring: Gym) -> None:
    retiring.bench.execute("UPDATE turns SET outcome = 'waiting'")  # a judge may make samples of them
    assert await retiring.practise() == Practised(policy="default", requests=0, more=False)
    retiring.bench.execute("UPDATE turns SET outcome = 'no_feedback'")
    retiring.engine.mismatch = True
    await ask(retiring, MOST_TRIED, session="other")
    while (await retiring.practise()).more:
        pass
    assert sum(one.measured is not None for one in retiring.engine.asked) == MOST_TRIED
    assert retiring.engine.asked[-1].measured is None


async def test_a_new_lesson_that_waits_for_requests_does_not_keep_older_ones_from_being_practised(
    retiring: Gym,
) -> None:
    await retiring.practise()
    retiring.bench.execute("UPDATE samples SET state = 'held_out'")  # there is room for others
    await retiring.lessons.add("default", POLITE)
    retiring.engine.mismatch = True
    retiring.engine.asked.clear()
    store = PostgresPracticeStore(retiring.bench.database)
    while (practice := await store.next("default")) is not None and practice.measured is not None:
        result = await retiring.activities._practise(practice)
        assert result is not None
        await store.keep(practice, result)
    assert len(retiring.engine.asked) == 12  # all that are not practised yet, in vain
    retiring.engine.mismatch = False
    retiring.engine.asked.clear()
    assert (await retiring.practise()).requests == 4
    assert {(one.measured, tuple(lesson.text for lesson in one.lessons)) for one in retiring.engine.asked} == {
        (None, (BRIEF,))
    }
    # Requests that come later measure the new lesson first; what a judge may still make a sample of is left to it.
    retiring.engine.asked.clear()
    retiring.bench.execute("UPDATE samples SET state = 'held_out'")
    await ask(retiring, 1, session="later")
    await retiring.bench.insert(*retiring.bench.conversation("request", session="not judged yet"))
    assert (await retiring.practise()).requests == 1
    (one,) = retiring.engine.asked
    assert one.measured is not None
    assert [lesson.text for lesson in one.lessons] == [BRIEF, POLITE]
    assert await violations(retiring.bench.database) == []


async def test_a_recipe_that_retires_nothing_measures_nothing(retiring: Gym) -> None:
    await set_recipe(retiring.bench, practising())
    await retiring.practise()
    assert {one.measured for one in retiring.engine.asked} == {None}
    assert retiring.bench.rows("SELECT FROM yardstick") == []


# Learned, and back ----------------------------------------------------------------------------------------------------


async def test_a_lesson_leaves_the_prompt_after_two_versions_that_say_the_same_without_it(retiring: Gym) -> None:
    await learn(retiring, 1, 0.1)
    once = await lesson_of(retiring)
    assert once.state is LessonState.ACTIVE
    assert once.yardstick is not None
    assert (once.yardstick.finding, once.yardstick.version) == (Finding.HAS_EFFECT, 0)
    assert once.yardstick.effect == pytest.approx(5)
    await learn(retiring, 2, 0.15)
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.since_version) == (LessonState.LEARNED, 1)
    assert lesson.why == "learned: versions 1 and 2 lack 10% and 15% of its effect in version 0"
    book = await retiring.lessons.book("default")
    assert book.shown == []
    events = retiring.bench.rows("SELECT detail FROM events WHERE kind = 'lesson_learned'")
    assert [row["detail"] for row in events] == [{"lesson": str(lesson.id), "version": 2, "why": lesson.why}]
    [view] = (await LessonOperations(retiring.lessons).list("default")).lessons
    assert (view.in_prompt, view.since_version) == (False, 1)
    assert view.yardstick is not None
    assert view.yardstick.summary == "effect 5.0 nats a reply, 4.4 to 5.6 in version 0; version 2 lacks 15% of it"
    assert await violations(retiring.bench.database) == []


async def test_a_roll_back_below_the_version_that_learned_it_brings_a_lesson_back(retiring: Gym) -> None:
    await learned(retiring)
    operators = PostgresTrainingStore(retiring.bench.database)
    await operators.roll_back("default", 1)
    assert (await lesson_of(retiring)).state is LessonState.LEARNED
    await operators.roll_back("default", 0)
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.since_version) == (LessonState.ACTIVE, 0)
    assert lesson.why == "version 1, which had learned it, does not answer any more: version 0 does"
    assert [one.id for one in (await retiring.lessons.book("default")).shown] == [lesson.id]


@pytest.mark.parametrize("share", [0.15, 0.3])
async def test_after_a_pin_a_lesson_is_learned_since_the_version_that_had_learned_it(
    retiring: Gym, share: float
) -> None:
    for n, lacks in ((1, 0.9), (2, 0.1), (3, 0.15)):
        await learn(retiring, n, lacks)
        await ask(retiring, 8, session=f"s{n}")
    await retiring.lessons.add("default", POLITE)  # else there is nothing to practise
    await learn(retiring, 4, share)
    assert (await lesson_of(retiring)).since_version == 2
    operators = PostgresTrainingStore(retiring.bench.database)
    await operators.pin("default", 1)
    pinned = await lesson_of(retiring)
    assert (pinned.state, pinned.since_version) == (LessonState.ACTIVE, 1)
    assert pinned.why == "version 2, which had learned it, does not answer any more: version 1 does"
    await operators.unpin("default")
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.since_version) == (LessonState.LEARNED, 2)
    assert lesson.why == "learned: versions 2 and 3 lack 10% and 15% of its effect in version 0"


async def test_a_pin_does_not_make_evidence_of_what_was_before_a_complaint(retiring: Gym) -> None:
    await ask(retiring, 40, session="more")
    await learned(retiring)
    await complain(retiring.bench, BRIEF)
    await learn(retiring, 3, 0.1)
    await learn(retiring, 4, 0.1)
    assert (await lesson_of(retiring)).since_version == 3
    operators = PostgresTrainingStore(retiring.bench.database)
    await operators.pin("default", 0)
    assert (await lesson_of(retiring)).since_version == 2
    await operators.unpin("default")
    assert (await lesson_of(retiring)).since_version == 3
    await operators.roll_back("default", 2)  # which the user complained of
    assert (await lesson_of(retiring)).state is LessonState.ACTIVE


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ("ANSWER in one sentence!", {BRIEF: LessonState.ACTIVE}),
        # By its words alone it might say the opposite as well.
        ("Not in one sentence.", {BRIEF: LessonState.LEARNED, "Not in one sentence.": LessonState.ACTIVE}),
        ("Use no lists.", {BRIEF: LessonState.LEARNED, "Use no lists.": LessonState.ACTIVE}),
    ],
)
async def test_a_complaint_that_says_the_same_brings_a_lesson_back(
    retiring: Gym, said: str, texts: dict[str, LessonState]
) -> None:
    await learned(retiring)
    await complain(retiring.bench, said)
    book = await retiring.lessons.book("default")
    assert {one.text: one.state for one in book.lessons} == texts
    if len(texts) == 1:
        lesson = await lesson_of(retiring)
        assert (lesson.why, lesson.since_version) == ("learned, and the user asked for it again", 2)


async def test_a_recipe_that_retires_nothing_any_more_brings_a_lesson_back(retiring: Gym) -> None:
    await learned(retiring)
    await set_recipe(retiring.bench, practising())
    await ask(retiring, 16, session="later")
    await retiring.lessons.add("default", POLITE)  # else there is nothing to practise
    await learn(retiring, 3, 0.1)
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.why) == (
        LessonState.ACTIVE,
        "whether it is still learned is not measured any more",
    )


async def test_such_a_recipe_brings_it_back_at_once(retiring: Gym) -> None:
    await learned(retiring)
    await change_recipe(retiring.bench.database, "default", practising())
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.why) == (LessonState.ACTIVE, "whether it is still learned is not measured any more")


async def test_forgetting_a_lesson_leaves_another_one_learned_that_was_measured_beside_it(retiring: Gym) -> None:
    polite = await retiring.lessons.add("default", POLITE)
    assert (await learned(retiring)).state is LessonState.LEARNED
    await retiring.lessons.forget("default", polite.id)
    assert {row["prompts"] for row in retiring.bench.rows("SELECT prompts FROM yardstick")} == {None}
    await ask(retiring, 16, session="later")
    await retiring.lessons.add("default", "Use no lists.")  # else there is nothing to practise
    await learn(retiring, 3, 0.6)
    lesson = await lesson_of(retiring)
    assert lesson.state is LessonState.LEARNED
    assert lesson.yardstick is not None
    assert [one.version for one in lesson.yardstick.left] == [1, 2]  # what its replies were scored in
    assert await violations(retiring.bench.database) == []


async def test_forgetting_a_lesson_leaves_another_one_its_effect_and_its_practice(retiring: Gym) -> None:
    polite = await retiring.lessons.add("default", POLITE)
    await learn(retiring, 1, 0.9)
    await retiring.lessons.forget("default", polite.id)
    retiring.engine.asked.clear()
    # Four requests are left to measure by; those that were practised with both are practised with the one.
    assert (await retiring.practise()).requests == 8
    assert [one.measured is None for one in retiring.engine.asked] == [False] * 4 + [True] * 4
    lesson = await lesson_of(retiring)
    assert lesson.yardstick is not None
    assert (lesson.yardstick.finding, lesson.yardstick.version) == (Finding.HAS_EFFECT, 0)
    assert await violations(retiring.bench.database) == []


async def test_a_reply_that_the_trainer_cannot_read_is_tried_and_replaced(retiring: Gym) -> None:
    await retiring.practise()
    steps = PostgresStepStore(retiring.bench.database)
    await steps.claim("default", 1)
    batch = await steps.batch("default", 1)
    too_long, *others = batch.yardstick
    scores = [YardstickScore(one.plain.sample_id, -9.0, -8.0, -12.0) for one in others]
    scores.append(YardstickScore(too_long.plain.sample_id, None))
    await steps.commit(batch, replace(trained(batch), yardstick=scores))
    [row] = retiring.bench.rows("SELECT turn_id, why FROM yardstick WHERE prompts IS NULL")
    assert (row["turn_id"], row["why"]) == (too_long.plain.sample_id, "longer than the trainer can read")
    await ask(retiring, 16, session="later")
    before = len(retiring.engine.asked)
    while (await retiring.practise()).more:
        pass
    assert sum(one.measured is not None for one in retiring.engine.asked[before:]) == 1


async def test_replies_that_were_erased_do_not_count_as_tried(retiring: Gym) -> None:
    await ask(retiring, MOST_TRIED + NEEDED, session="more")
    for _ in range(MOST_TRIED // NEEDED + 1):
        retiring.engine.asked.clear()
        await retiring.practise()
        assert sum(one.measured is not None for one in retiring.engine.asked) == NEEDED
        retiring.bench.execute("UPDATE yardstick SET prompts = NULL, why = 'erased'")


async def test_a_version_that_lacks_it_again_brings_a_lesson_back(retiring: Gym) -> None:
    await learned(retiring)
    await retiring.lessons.add("default", POLITE)  # else there is nothing to practise
    await ask(retiring, 16, session="later")
    await learn(retiring, 3, 0.6)
    lesson = await lesson_of(retiring)
    assert (lesson.state, lesson.why) == (
        LessonState.ACTIVE,
        "forgotten: version 3 lacks 60% of its effect again",
    )


async def test_three_versions_that_cannot_learn_it_are_told_and_it_stays(retiring: Gym) -> None:
    await ask(retiring, 16, session="more")
    for n in (1, 2, 3):
        await learn(retiring, n, 0.8)
    lesson = await lesson_of(retiring)
    assert lesson.state is LessonState.ACTIVE
    assert lesson.yardstick is not None
    assert lesson.yardstick.finding is Finding.NOT_LEARNED


# Forgotten, and erased ------------------------------------------------------------------------------------------------


async def test_forgetting_a_learned_lesson_says_which_versions_hold_it(retiring: Gym) -> None:
    await learned(retiring)
    operations = LessonOperations(retiring.lessons)
    [before] = (await operations.list("default")).lessons
    forgotten = await operations.forget("default", str(before.id))
    assert (before.versions, before.roll_back_to) == ((1, 2), 0)
    assert (forgotten.turns, forgotten.versions, forgotten.roll_back_to) == (0, (1, 2), 0)
    assert forgotten.what_is_left("default").startswith(
        "Versions 1 to 2 have learned from it: `clawloop policy roll-back 0 --policy default` goes back"
    )
    assert {row["prompts"] for row in retiring.bench.rows("SELECT prompts FROM yardstick")} == {None}
    assert await violations(retiring.bench.database) == []
    retiring.bench.execute("UPDATE yardstick SET prompts = 'abcd' WHERE turn_id IS NOT NULL")
    assert {one.invariant for one in await violations(retiring.bench.database)} == {"an erased lesson is in no prompt"}


async def test_the_roll_back_that_is_offered_goes_to_a_version_that_has_files(retiring: Gym) -> None:
    await learned(retiring)
    polite = await retiring.lessons.add("default", POLITE)
    await ask(retiring, 16, session="later")
    await learn(retiring, 3, 0.9)
    operations = LessonOperations(retiring.lessons)
    offered = []
    for removed in (None, 2, 1):
        retiring.bench.execute("UPDATE versions SET removed_at = now() WHERE n = %s", removed)
        view = next(one for one in (await operations.list("default")).lessons if one.id == polite.id)
        assert view.versions == (3,)
        offered.append(view.roll_back_to)
    assert offered == [2, 1, 0]
    retiring.bench.execute("UPDATE versions SET removed_at = NULL WHERE n = 1")
    assert (await operations.forget("default", str(polite.id))).roll_back_to == 1
    await PostgresTrainingStore(retiring.bench.database).roll_back("default", 1)  # not refused


async def test_an_erased_request_takes_the_reply_that_measured_by_it_along(retiring: Gym) -> None:
    await learn(retiring, 1, 0.1)
    [source] = {one.source.turn_id for one in retiring.engine.asked[:1]}
    await PostgresErasureStore(retiring.bench.database).erase_turn(source)
    [row] = retiring.bench.rows("SELECT turn_id, prompts FROM yardstick WHERE source_turn_id = %s", source)
    stored = await retiring.bench.turn(TurnId(row["turn_id"]))
    assert (stored.outcome, stored.record.response_ids, row["prompts"]) == (TurnOutcome.ERASED, None, None)
    lesson = await lesson_of(retiring)
    assert lesson.yardstick is not None
    assert (lesson.yardstick.finding, lesson.yardstick.replies) == (Finding.HAS_EFFECT, NEEDED)  # numbers stay
    assert await violations(retiring.bench.database) == []


@pytest.mark.parametrize("measures_first", [True, False])
async def test_two_workers_at_once_either_practise_a_request_or_measure_by_it(
    retiring: Gym, measures_first: bool
) -> None:
    await retiring.practise()
    retiring.bench.execute("UPDATE samples SET state = 'held_out'")  # there is room for others
    store = PostgresPracticeStore(retiring.bench.database)
    practised = await store.next("default")
    assert practised is not None
    assert practised.measured is None
    polite = await retiring.lessons.add("default", POLITE)
    measuring = replace(practised, lessons=(*practised.lessons, polite.shown), measured=polite.id)
    before = len(retiring.bench.rows("SELECT FROM turns WHERE kind = 'practice'"))
    both = [measuring, practised]
    for practice in both if measures_first else both[::-1]:
        result = await retiring.activities._practise(practice)
        assert result is not None
        await store.keep(practice, result)
    assert len(retiring.bench.rows("SELECT FROM turns WHERE kind = 'practice'")) == before + 1
    assert len(retiring.bench.rows("SELECT FROM yardstick WHERE lesson_id = %s", polite.id)) == measures_first
    assert await violations(retiring.bench.database) == []
