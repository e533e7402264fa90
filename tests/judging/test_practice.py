"""Practice on PostgreSQL: the requests that are answered again, and their samples; the engine is scripted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from temporalio.common import RetryPolicy
from temporalio.testing import ActivityEnvironment

from activities.practice import PracticeActivities, Practise, Practised
from clawloop.core.contracts.lessons import Lesson, LessonState
from clawloop.core.contracts.training import SampleState, StepState
from clawloop.core.contracts.turns import Message, TurnKind, TurnOutcome, TurnRecord, TurnStatus
from clawloop.core.contracts.views import SessionFilter
from clawloop.core.errors import EngineAnswerUnusable, EngineRejected, EngineUnavailable, StoreUnavailable
from clawloop.core.ids import SampleId, TurnId, new_turn_id
from clawloop.core.judging.hints import CONTROL_HINT
from clawloop.core.lessons.practice import Practice, PractisedReply
from clawloop.core.lessons.prompt import DEFAULT_SYSTEM, LEAD_IN, turn_as_sent
from clawloop.core.recipes.lessons import Lessons
from clawloop.core.recipes.recipe import CONTROL, DEFAULT_RECIPE, Optimiser, Recipe
from clawloop.core.samples.decision import is_held_out
from clawloop.operations.export import ExportKind
from db.erasure import PostgresErasureStore
from db.invariants import violations
from db.lessons.ledger import PostgresLessonStore
from db.lessons.practice import PostgresPracticeStore
from db.training.status import PostgresTrainingBrowser
from db.training.steps import PostgresStepStore
from db.turns.sessions import PostgresSessionStore
from tests.judging.conftest import Bench, set_recipe
from tests.judging.test_export import exported
from tests.records import turn_record

ROOT = Path(__file__).parents[2]
BRIEF, POLITE = "Answer in one sentence.", "Say please."


def practising(**changes: Any) -> Recipe:
    """The recipe of a new policy with practice, batches of four, nothing held out, and steps for few weights."""
    lessons = Lessons(enabled=True, practice=True)
    pace = {"batch_samples": 4, "optimiser": Optimiser(lr=1e-4, beta1=0.5, grad_clip=0.05)}
    train = DEFAULT_RECIPE.train.model_copy(update=pace)
    gate = DEFAULT_RECIPE.gate.model_copy(update={"held_out": 0.0})
    return DEFAULT_RECIPE.model_copy(update={"lessons": lessons, "train": train, "gate": gate} | changes)


def ids_of(messages: Sequence[Message]) -> list[int]:
    """A token for each character, behind one for each message."""
    return [token for one in messages for token in (1, *str(one["content"]).encode())]


@dataclass
class ScriptedEngine:
    """
    Attributes:
        idle: else it answers nothing.
        mismatch: its template renders something else than it reads.
        asked: the requests that it answered.
    """

    idle: bool = True
    mismatch: bool = False
    refuses: Exception | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    asked: list[Practice] = field(default_factory=list)

    async def answer(self, practice: Practice) -> PractisedReply | None:
        if not self.idle:
            return None
        self.asked.append(practice)
        if self.refuses is not None:
            raise self.refuses
        source = practice.source
        default = {DEFAULT_SYSTEM: "You are a clock."} if practice.shown else {}
        record = replace(
            source,
            turn_id=new_turn_id(),
            kind=TurnKind.PRACTICE,
            kind_reason=f"practice of the request of {source.turn_id}",
            group_id=None,
            version=practice.version,
            response={"role": "assistant", "content": f"again {source.turn_id}"},
            response_ids=[4, 5, 6],
            logprobs=[-0.5, -0.25, -0.125],
            sampling={**source.sampling, **default},
            lessons=practice.shown,
        )
        record = replace(record, prompt_ids=ids_of(turn_as_sent(record, source.messages)))
        return PractisedReply(replace(record, **self.changes), "You are a clock.")

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        return [*ids_of(turn_as_sent(turn, messages)), *([0] * self.mismatch)]


@dataclass
class Gym:
    """A policy with a lesson, and what practises it."""

    bench: Bench
    engine: ScriptedEngine
    activities: PracticeActivities
    lessons: PostgresLessonStore
    brief: Lesson

    async def practise(self) -> Practised:
        return await self.activities.practise(Practise(policy="default"))

    def samples(self) -> list[dict[str, Any]]:
        return self.bench.rows(
            "SELECT s.id, s.state, s.reason, s.reward, s.turn_id, octet_length(s.hinted_prompts) AS hinted, p.why,"
            " p.source_turn_id, p.lessons FROM practice p LEFT JOIN samples s ON s.turn_id = p.turn_id"
            " ORDER BY p.source_turn_id DESC"
        )

    async def batch(self, n: int) -> list[Any]:
        steps = PostgresStepStore(self.bench.database)
        assert (await steps.claim("default", n)).state is StepState.CLAIMED
        return list((await steps.batch("default", n)).samples)


@pytest.fixture
async def gym(bench: Bench) -> Gym:
    await set_recipe(bench, practising())
    engine, lessons = ScriptedEngine(), PostgresLessonStore(bench.database)
    store = PostgresPracticeStore(bench.database)
    activities = PracticeActivities(store, engine.answer, engine.render, bench.work)
    return Gym(bench, engine, activities, lessons, await lessons.add("default", BRIEF))


def asked_of(gym: Gym) -> list[str]:
    return [str(practice.source.messages[-1]["content"]) for practice in gym.engine.asked]


# What is practised ----------------------------------------------------------------------------------------------------


async def test_the_newest_requests_are_answered_again_once_for_each_set_of_lessons(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", "two"))
    assert await gym.practise() == Practised(policy="default", requests=2, more=False)
    assert asked_of(gym) == ["two", "one"]
    assert (await gym.practise()).requests == 0
    polite = await gym.lessons.add("default", POLITE)
    assert (await gym.practise()).requests == 2
    assert [one.text for one in gym.engine.asked[-1].lessons] == [BRIEF, POLITE]
    await gym.lessons.change("default", polite.id, LessonState.OFF, "turned off")
    assert (await gym.practise()).requests == 0
    counts = {one.text: one.practised for one in (await gym.lessons.book("default")).lessons}
    assert counts == {BRIEF: 4, POLITE: 2}
    assert await violations(gym.bench.database) == []


async def test_a_sample_is_the_plain_reply_taught_behind_the_lessons_and_a_control(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", "two", "three", "four"))
    await gym.practise()
    (newest, *_) = sorted(await gym.batch(1), key=lambda sample: -len(sample.prompt_ids))
    plain = gym.engine.asked[0].source.messages
    assert newest.prompt_ids == ids_of(plain)
    assert (newest.response_ids, newest.reward) == ([4, 5, 6], None)
    wanted = {0: BRIEF, CONTROL: CONTROL_HINT}
    for place, said in wanted.items():
        system = f"You are a clock.\n\n{LEAD_IN}\n- {said}"
        assert bytes(newest.hinted_prompts[place]) == b"\x01" + system.encode() + bytes(newest.prompt_ids)
    assert newest.hinted_prompts.keys() == wanted.keys()


async def test_a_recipe_without_a_control_gets_none(gym: Gym) -> None:
    train = practising().train
    advantage = train.advantage.model_copy(update={"control": False})
    await set_recipe(gym.bench, practising(train=train.model_copy(update={"advantage": advantage})))
    await gym.bench.insert(*gym.bench.conversation("one", "two", "three", "four"))
    await gym.practise()
    assert {place for sample in await gym.batch(1) for place in sample.hinted_prompts} == {0}


@pytest.mark.parametrize("several", [False, True])
async def test_what_is_held_out_is_not_practised(gym: Gym, several: bool) -> None:
    gate = DEFAULT_RECIPE.gate.model_copy(update={"held_out": 0.5})
    train = practising().train.model_copy(update={"batch_samples": 64})
    await set_recipe(gym.bench, practising(gate=gate, train=train))
    turns = [gym.bench.conversation("one", session=f"s{n}")[0] for n in range(20)]
    await gym.bench.insert(*(replace(turn, group_id=new_turn_id() if several else None) for turn in turns))
    while (await gym.practise()).more:
        pass
    units = {
        row["unit"]
        for row in gym.bench.rows("SELECT coalesce(group_id, session_id) AS unit FROM turns o WHERE kind = 'main'")
    }
    practised = {
        row["unit"]
        for row in gym.bench.rows(
            "SELECT coalesce(o.group_id, o.session_id) AS unit FROM practice p JOIN turns o ON o.id = p.source_turn_id"
        )
    }
    assert practised == {unit for unit in units if not is_held_out("default", unit, 0.5)}
    assert len(practised) < len(units)
    assert {row["state"] for row in gym.samples()} == {SampleState.FRESH}


@pytest.mark.parametrize(
    "why", ["no lesson", "off", "not practised", "paused", "no engine", "side", "outside of its hours"]
)
async def test_nothing_is_practised_where_nothing_is_to_be(gym: Gym, why: str) -> None:
    kind = {"kind": TurnKind.SIDE} if why == "side" else {}
    await gym.bench.insert(*gym.bench.conversation("one", **kind))
    match why:
        case "no lesson":
            await gym.lessons.change("default", gym.brief.id, LessonState.OFF, "turned off")
        case "off":
            await set_recipe(gym.bench, practising(lessons=Lessons()))
        case "not practised":
            await set_recipe(gym.bench, practising(lessons=Lessons(enabled=True)))
        case "paused":
            gym.bench.execute("UPDATE policies SET paused_reason = 'lunch'")
        case "no engine":
            gym.engine.idle = False
        case "outside of its hours":
            hour = gym.bench.rows("SELECT extract(hour FROM now() AT TIME ZONE 'UTC')::int AS hour")[0]["hour"]
            hours = f"{(hour + 3) % 24:02}:00-{(hour + 4) % 24:02}:00"
            known = practising().train.model_dump(mode="json")
            train = type(practising().train).model_validate(known | {"schedule": {"hours": hours}})
            await set_recipe(gym.bench, practising(train=train))
    done = await gym.practise()
    assert (done.requests, done.more, gym.samples()) == (0, why == "no engine", [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling": {"temperature": 0.6, "top_p": 0.5, "top_k": -1}}, "not trainable: top_p"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "not trainable: strict"),
    ],
)
async def test_a_request_whose_reply_could_not_be_trained_is_not_asked_again(
    gym: Gym, changes: dict[str, Any], why: str
) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", **changes))
    assert (await gym.practise()).requests == 1
    (sample,) = gym.samples()
    assert sample["why"].startswith(why)
    assert (sample["id"], gym.engine.asked) == (None, [])
    assert (await gym.practise()).requests == 0


async def test_a_request_is_asked_again_although_a_forgotten_lesson_took_its_tokens_along(gym: Gym) -> None:
    gone = await gym.lessons.add("default", POLITE)
    (asked,) = gym.bench.conversation("one", lessons=(gone.shown,))
    await gym.bench.insert(asked)
    await gym.lessons.forget("default", gone.id)
    assert (await gym.bench.turn(asked.turn_id)).record.prompt_ids is None
    assert (await gym.practise()).requests == 1
    (sample,) = gym.samples()
    assert (sample["state"], sample["source_turn_id"]) == (SampleState.FRESH, asked.turn_id)
    assert await violations(gym.bench.database) == []


@pytest.mark.parametrize("trouble", ["empty", "mismatch", "refused", "no chat", "cut off"])
async def test_a_reply_that_cannot_be_trained_makes_no_turn(gym: Gym, trouble: str) -> None:
    await gym.bench.insert(*gym.bench.conversation("one"))
    match trouble:
        case "empty":
            gym.engine.changes = {"response": {"role": "assistant", "content": ""}}
        case "mismatch":
            gym.engine.mismatch = True
        case "refused":
            gym.engine.refuses = EngineRejected(400, {"message": "too long"})
        case "no chat":
            gym.engine.refuses = EngineAnswerUnusable("it is no chat completion")
        case "cut off":
            gym.engine.changes = {"status": TurnStatus.ABORTED}
    assert (await gym.practise()).requests == 1
    (row,) = gym.samples()
    assert (row["id"], row["turn_id"]) == (None, None)
    assert gym.bench.rows("SELECT FROM turns WHERE kind = 'practice'") == []
    assert (await gym.practise()).requests == 0
    assert await violations(gym.bench.database) == []


async def test_at_most_a_batch_waits(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation(*(f"request {n}" for n in range(6))))
    assert await gym.practise() == Practised(policy="default", requests=4, more=False)
    assert len(gym.bench.notifier.notices) == 1  # the batch is full
    assert len(await gym.batch(1)) == 4
    assert (await gym.practise()).requests == 0  # a step has them
    gym.bench.execute("UPDATE samples SET state = 'trained'")
    assert (await gym.practise()).requests == 2


async def test_stale_samples_make_room_for_others(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation(*(f"request {n}" for n in range(6))))
    assert (await gym.practise()).requests == 4
    gym.bench.execute(
        "INSERT INTO versions (policy, n, parent, path, sha256)"
        " SELECT 'default', n, n - 1, 'v' || n, decode('00', 'hex') FROM generate_series(1, 5) n"
    )
    gym.bench.execute("UPDATE policies SET head = 5")
    assert (await gym.practise()).requests == 2
    states = [(row["state"], row["reason"]) for row in gym.samples()]
    stale = (SampleState.EXPIRED, "stale: 5 versions apart, bound 4")
    assert states == [stale] * 4 + [(SampleState.FRESH, states[-1][1])] * 2
    assert gym.bench.rows("SELECT work_waiting FROM policies") == [{"work_waiting": False}]


# Once, whatever is killed ---------------------------------------------------------------------------------------------


async def test_an_engine_or_a_store_that_is_away_loses_nothing(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one"))
    gym.engine.refuses = EngineUnavailable("gone")
    with pytest.raises(EngineUnavailable):
        await gym.practise()
    gym.engine.refuses = None
    gym.bench.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '57P01'; END $$"
    )
    gym.bench.execute("CREATE TRIGGER fails BEFORE INSERT ON samples FOR EACH ROW EXECUTE FUNCTION fail()")
    with pytest.raises(StoreUnavailable):
        await gym.practise()
    assert gym.bench.rows("SELECT FROM turns WHERE kind = 'practice'") == []  # one transaction
    gym.bench.execute("DROP TRIGGER fails ON samples")
    assert (await gym.practise()).requests == 1
    assert len(gym.samples()) == 1


@pytest.mark.parametrize(("when", "kept"), [("answered", 1), ("inserting", 1), ("kept", 2)])
async def test_a_worker_that_is_killed_while_practising_loses_nothing_and_makes_nothing_twice(
    gym: Gym, when: str, kept: int
) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", "two", "three"))
    program = [sys.executable, "-m", "tests.judging.killed_practice", gym.bench.url, when]
    killed = await asyncio.to_thread(subprocess.run, program, cwd=ROOT, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert len(gym.samples()) == kept
    assert (await gym.practise()).requests == 3 - kept
    asked = {row["source_turn_id"]: row["state"] for row in gym.samples()}
    assert (len(asked), set(asked.values()), len(gym.samples())) == (3, {SampleState.FRESH}, 3)
    assert len(gym.bench.rows("SELECT FROM turns WHERE kind = 'practice'")) == 3
    assert await violations(gym.bench.database) == []


async def test_a_request_that_no_engine_answers_does_not_keep_others_waiting(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", "two"))
    (answer, asked) = gym.engine.answer, []

    async def breaks_at_two(practice: Practice) -> PractisedReply | None:
        asked.append(practice.source.messages[-1]["content"])
        if asked[-1] == "two":
            raise EngineUnavailable("an engine answered 500 to a practised request")
        return await answer(practice)

    practising = PracticeActivities(
        PostgresPracticeStore(gym.bench.database), breaks_at_two, gym.engine.render, gym.bench.work
    )
    for attempt in (1, 2, 3):
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, attempt=attempt, retry_policy=RetryPolicy(maximum_attempts=3))
        if attempt < 3:
            with pytest.raises(EngineUnavailable):
                await environment.run(practising.practise, Practise(policy="default"))
        else:
            assert (await environment.run(practising.practise, Practise(policy="default"))).requests == 2
    assert asked == ["two", "two", "two", "one"]
    newest, oldest = gym.samples()
    assert (newest["id"], newest["why"]) == (
        None,
        "an engine answered 500 to a practised request, and nothing better at earlier attempts",
    )
    assert oldest["state"] == SampleState.FRESH
    assert await violations(gym.bench.database) == []


async def test_two_workers_at_once_make_one_sample(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one"))
    await asyncio.gather(*(gym.practise() for _ in range(4)))
    assert len(gym.engine.asked) > 1
    assert len(gym.samples()) == len(gym.bench.rows("SELECT FROM turns WHERE kind = 'practice'")) == 1


@pytest.mark.parametrize("change", ["lesson added", "recipe", "erased"])
async def test_what_changed_while_an_engine_answered_makes_no_sample(gym: Gym, change: str) -> None:
    session = await gym.bench.insert(*gym.bench.conversation("one"))
    store = PostgresPracticeStore(gym.bench.database)
    practice = await store.next("default")
    assert practice is not None
    match change:
        case "lesson added":
            await gym.lessons.add("default", POLITE)
        case "recipe":
            await set_recipe(gym.bench, practising(name="another"))
        case "erased":
            await PostgresErasureStore(gym.bench.database).erase_session(session)
    result = await gym.activities._practise(practice)
    assert result is not None
    assert await store.keep(practice, result) is None
    assert gym.samples() == []


# Nobody sees it -------------------------------------------------------------------------------------------------------


async def test_a_practised_reply_is_in_no_conversation(gym: Gym) -> None:
    first, second, third = gym.bench.conversation("one", "two", "three")
    session = await gym.bench.insert(first, second)
    sessions = PostgresSessionStore(gym.bench.database)
    before = await sessions.session(session), await sessions.turns(session)
    await gym.practise()
    (newest, oldest) = gym.samples()
    assert (await sessions.session(session), await sessions.turns(session)) == before
    assert await sessions.position(session, new_turn_id()) == 2
    assert (await sessions.turns_from(session, 0, 9)) == before[1]
    wanted = SessionFilter(kind=TurnKind.PRACTICE)
    assert await sessions.sessions(wanted, after=None, limit=9) == []
    # A client that had the practised reply, e.g. by chance, continues the turn that it saw.
    again = await gym.bench.turn(TurnId(oldest["turn_id"]))
    assert again.record.response is not None
    other = turn_record(
        api_key_id=gym.bench.key,
        evidence=first.evidence,
        messages=[*first.messages, again.record.response, {"role": "user", "content": "and?"}],
    )
    await gym.bench.insert(third, other)
    assert (await gym.bench.turn(third.turn_id)).parent_turn_id == second.turn_id
    assert (await gym.bench.turn(other.turn_id)).parent_turn_id != oldest["turn_id"]
    (result, *_) = await gym.bench.judge_turn(session, third)
    assert result.turn_id == second.turn_id
    practised = await gym.bench.judge_turn(session, again.record, itself=True)
    assert [(one.outcome, one.sample) for one in practised] != [(TurnOutcome.SAMPLED, True)]
    view = await sessions.turn(TurnId(newest["turn_id"]))
    assert view is not None
    assert (view.kind, view.outcome, [hint.text for hint in view.hints]) == (
        TurnKind.PRACTICE,
        TurnOutcome.SAMPLED,
        [BRIEF],
    )
    assert await violations(gym.bench.database) == []


# Claimed, and erased --------------------------------------------------------------------------------------------------


async def test_samples_of_users_are_claimed_before_practised_ones(gym: Gym) -> None:
    turns = gym.bench.conversation(*(f"request {n}" for n in range(5)))
    session = await gym.bench.insert(*turns)
    await gym.practise()
    for turn in turns[1:4]:
        gym.bench.judge.votes, gym.bench.judge.hint = [-1], None
        await gym.bench.judge_turn(session, turn)
    batch = [sample.sample_id for sample in await gym.batch(1)]
    practised = {SampleId(row["id"]) for row in gym.samples()}
    assert [sample in practised for sample in batch] == [False, False, False, True]
    shown = await PostgresTrainingBrowser(gym.bench.database).batch("default", 1)
    (again,) = [reply for reply in shown if reply.practice_of is not None]
    assert (again.practice_of, again.number) == (turns[4].turn_id, 5)
    assert [(hint.text, hint.source) for hint in again.hints] == [(BRIEF, "lessons")]
    samples = await exported(gym.bench, ExportKind.SAMPLES)
    assert {SampleId(UUID(str(each["id"]))) for each in samples if each["hint_source"] == "lessons"} == practised


async def test_practised_samples_correct_nothing_that_users_said(gym: Gym) -> None:
    train = practising().train.model_copy(update={"corrected_share": 0.5})
    await set_recipe(gym.bench, practising(train=train))
    turns = gym.bench.conversation(*(f"request {n}" for n in range(4)))
    session = await gym.bench.insert(*turns)
    gym.bench.judge.votes, gym.bench.judge.hint = [1], None
    for turn in turns[1:3]:
        await gym.bench.judge_turn(session, turn)
    await gym.practise()
    batch = {sample.sample_id for sample in await gym.batch(1)}
    assert batch == {SampleId(row["id"]) for row in gym.samples()}
    why = "nothing to correct: 0 of 2 samples blamed or hinted, 0.5 of them are needed (train.corrected_share)"
    assert gym.bench.rows("SELECT reason FROM samples WHERE state = 'expired'") == [{"reason": why}] * 2


@pytest.mark.parametrize("to", [LessonState.OFF, LessonState.SUPERSEDED, LessonState.ERASED])
async def test_a_lesson_that_goes_ends_what_waits_to_teach_it(gym: Gym, to: LessonState) -> None:
    await gym.bench.insert(*gym.bench.conversation(*(f"request {n}" for n in range(4))))
    await gym.practise()
    match to:
        case LessonState.OFF:
            await gym.lessons.change("default", gym.brief.id, to, "turned off")
        case LessonState.SUPERSEDED:
            await gym.lessons.add("default", "Answer at length.", gym.brief.id)
        case LessonState.ERASED:
            await gym.lessons.forget("default", gym.brief.id)
    why = "lesson erased" if to is LessonState.ERASED else f"its lesson is {to.value}"
    assert {(row["state"], row["reason"]) for row in gym.samples()} == {(SampleState.EXPIRED, why)}
    if to is LessonState.ERASED:
        assert {row["hinted"] for row in gym.samples()} == {0}
        assert gym.bench.rows("SELECT FROM judgements WHERE hint <> 'erased'") == []
        gym.bench.execute("UPDATE judgements SET hint = 'Answer in one sentence.'")
        assert {found.invariant for found in await violations(gym.bench.database)} == {
            "an erased lesson is in no prompt"
        }
        gym.bench.execute("UPDATE judgements SET hint = 'erased'")
    assert gym.bench.rows("SELECT work_waiting FROM policies") == [{"work_waiting": False}]
    assert await violations(gym.bench.database) == []


@pytest.mark.parametrize("to", [LessonState.OFF, LessonState.ERASED])
async def test_a_lesson_that_goes_while_a_step_has_its_samples_is_not_taught_by_a_later_one(
    gym: Gym, to: LessonState
) -> None:
    await gym.bench.insert(*gym.bench.conversation(*(f"request {n}" for n in range(4))))
    await gym.practise()
    await gym.batch(1)
    if to is LessonState.ERASED:
        await gym.lessons.forget("default", gym.brief.id)
    else:
        await gym.lessons.change("default", gym.brief.id, to, "turned off")
    assert {row["state"] for row in gym.samples()} == {SampleState.CLAIMED}
    await PostgresStepStore(gym.bench.database).abandon("default", 1, "its trainer is gone")
    assert {(row["state"], row["reason"]) for row in gym.samples()} == {
        (SampleState.EXPIRED, f"its lesson is {to.value}")
    }
    assert gym.bench.rows("SELECT work_waiting FROM policies") == [{"work_waiting": False}]
    assert await violations(gym.bench.database) == []


async def test_practice_takes_nothing_of_what_a_key_may_store(gym: Gym) -> None:
    await gym.bench.insert(*gym.bench.conversation("one", "two"))
    stored = "SELECT coalesce(sum(bytes), 0)::int AS bytes FROM stored_bytes"
    before = gym.bench.rows(stored)
    await gym.practise()
    assert len(gym.samples()) == 2
    assert gym.bench.rows(stored) == before
    assert gym.bench.rows("SELECT DISTINCT stored_bytes FROM turns WHERE kind = 'practice'") == [{"stored_bytes": 0}]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("beside", [True, False])
async def test_an_erased_request_takes_its_practice_along(gym: Gym, whole: bool, beside: bool) -> None:
    """Wherever the practice turn stands: the request may have got another parent since."""
    first, second, *_ = gym.bench.conversation("one", "two")
    session = await gym.bench.insert(first, second)
    await gym.practise()
    if not beside:
        gym.bench.execute(
            "UPDATE turns SET parent_turn_id = NULL, matched_by = NULL, messages_kept = 0, prompt_shared = 0"
            " WHERE kind = 'practice'"
        )
    erasure = PostgresErasureStore(gym.bench.database)
    erased = await (erasure.erase_session(session) if whole else erasure.erase_turn(second.turn_id))
    assert erased is not None
    assert erased.turns == (2 if whole else 1)  # of the user
    newest, oldest = gym.samples()
    assert (newest["state"], newest["hinted"], oldest["state"]) == (
        SampleState.EXPIRED,
        0,
        SampleState.EXPIRED if whole else SampleState.FRESH,
    )
    stored = await gym.bench.turn(TurnId(newest["turn_id"]))
    assert (stored.outcome, stored.record.messages, stored.record.response_ids) == (TurnOutcome.ERASED, [], None)
    assert await violations(gym.bench.database) == []
    await erasure.erase_session(session)
    (left,) = gym.bench.rows("SELECT coalesce(sum(bytes), 0)::int AS bytes FROM stored_bytes")
    (kept,) = gym.bench.rows("SELECT coalesce(sum(stored_bytes), 0)::int AS bytes FROM turns")
    assert kept == left == {"bytes": 0}
