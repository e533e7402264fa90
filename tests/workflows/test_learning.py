"""Training that is long, shared, probed, or without its parts for a day."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.probe_version import AskBase, BaseAsked, ProbeActivities, ProbeVersion, VersionProbed
from activities.training.steps import ClaimBatch
from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES
from clawloop.app.temporal.server import UPDATE_LIMIT
from clawloop.core.contracts.training import (
    AskedProbe,
    Claim,
    GateCheck,
    ProbeAnswer,
    ProbeContent,
    ProbePlan,
    VersionRef,
)
from clawloop.core.errors import AdapterUnreadable, ClawloopError, EngineUnavailable, StoreUnavailable
from clawloop.core.families.template import Thinking
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Gate, Recipe
from clawloop.serving.judge import JudgeClient
from clawloop.training.adapters.files import write_error
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning, orchestrating, training
from tests.workflows.shared_trainer import all_queued, shared_trainer
from tests.workflows.test_judge_command import clawloop, end_unjudged
from tests.workflows.test_whole import at_work
from workflows import names
from workflows.activity_options import ASK_BASE, JUDGE, LOCAL_STORE, PROBE

__all__ = ["bench", "binary_bench", "judge"]


# Training longer than one history: it continues as new between steps, and each batch is trained once.

STEPS = 50
RUN_EVENTS = 125


async def test_many_steps_take_several_runs_of_bounded_size(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.needed = 1
    async with learning(client, scripted):
        learner = Learner(client, scripted)
        await learner.begin(roll_over_events=RUN_EVENTS)
        await learner.samples(STEPS)
        async with asyncio.timeout(120):
            await until(lambda: scripted.version == STEPS, seconds=110)
        details = await learner.shows(f"v{STEPS} answers, the newest")
        sizes, largest = await histories(client, learner)
    assert [line for line in scripted.happened if line.startswith("train")] == [
        f"train {n}" for n in range(1, STEPS + 1)
    ]
    assert details.count("committed") == 20
    assert len(sizes) > 5
    # A run ends after the step during which it reached its limit.
    assert max(sizes) < RUN_EVENTS + 60
    assert largest < PAYLOAD_WARN_BYTES
    print(f"\n{STEPS} steps: {len(sizes)} runs, {sum(sizes) / STEPS:.1f} events a step, largest {largest} bytes")  # noqa: T201


async def histories(client: Client, learner: Learner) -> tuple[list[int], int]:
    """The number of events of each run, and the largest event in bytes."""
    sizes: list[int] = []
    largest = 0
    described = await learner.handle.describe()
    run_id: str | None = described.raw_description.workflow_execution_info.first_run_id
    while run_id:
        history = await client.get_workflow_handle(described.id, run_id=run_id).fetch_history()
        sizes.append(len(history.events))
        largest = max(largest, *(event.ByteSize() for event in history.events))
        run_id = history.events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id or None
    return sizes, largest


async def test_changes_around_a_roll_over_hold(client: Client) -> None:
    scripted = ScriptedLearning()
    async with learning(client, scripted):
        learner = Learner(client, scripted)
        await learner.begin(roll_over_events=20)
        for _ in range(4):
            await learner.samples(16)
        await until(lambda: scripted.version == 4)
        await learner.pause("enough")
        await learner.samples(16)
        await learner.shows("paused: enough")
        await learner.resume()
        await until(lambda: scripted.version == 5)


# Short calls of the ledger are made where the training workflow runs; one that fails waits on the ledger's queue.


class Hanging(ScriptedLearning):
    """A claim where the workflow runs gets no answer.

    Attributes:
        hung: how many did.
    """

    hung = 0

    @activity.defn(name="claim_batch")
    async def claim(self, ask: ClaimBatch) -> Claim:
        if activity.info().is_local:
            self.hung += 1
            await asyncio.Event().wait()
        return await super().claim(ask)


async def queued(learner: Learner) -> Counter[str]:
    """How many activities of each kind went by a queue."""
    events = (await learner.handle.fetch_history()).events
    return Counter(
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    )


async def test_a_step_waits_for_no_queue_but_its_trainer_s(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_STORE, "start_to_close_timeout", timedelta(seconds=60))  # on a busy machine
    scripted = ScriptedLearning()
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(2 * scripted.needed)
        await until(lambda: scripted.version == 2)
        # A version may be published together with the one before.
        assert (await queued(learner)).keys() == {"train_step", "publish_version"}
        assert (await queued(learner))["train_step"] == 2


async def test_while_postgresql_is_away_a_batch_is_claimed_by_the_queue_which_waits(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.claims_fail = [ApplicationError("PostgreSQL is away", type="StoreUnavailable")] * 4
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(scripted.needed)
        await until(lambda: scripted.version == 1)
        assert (await queued(learner))["claim_batch"] == 1
    assert scripted.happened.count("claim 1: 16") == 1


def test_a_call_is_given_up_before_an_operator_s_update_is() -> None:
    assert LOCAL_STORE["retry_policy"].maximum_attempts == 1
    assert LOCAL_STORE["start_to_close_timeout"] < UPDATE_LIMIT


async def test_an_operator_s_update_is_answered_though_a_call_hangs(client: Client) -> None:
    hanging = Hanging()
    learner = Learner(client, hanging)
    async with learning(client, hanging):
        await learner.samples(hanging.needed)
        await until(lambda: hanging.hung > 0)
        await learner.set_recipe(hanging.needed)
        await until(lambda: hanging.version == 1)
        assert (await queued(learner))["claim_batch"] >= 1
    assert hanging.happened.count("claim 1: 16") == 1


async def test_a_call_that_hangs_while_its_worker_stops_is_made_by_the_next_one_on_the_queue(client: Client) -> None:
    hanging = Hanging()
    learner = Learner(client, hanging)
    async with training(client, hanging):
        async with orchestrating(client, hanging.where_workflows_run, hanging.on_the_queue):
            await learner.samples(hanging.needed)
            await until(lambda: hanging.hung > 0)
        async with learning(client, hanging, trainer=False):
            await until(lambda: hanging.version == 1)
            assert (await queued(learner))["claim_batch"] >= 1
    assert hanging.happened.count("claim 1: 16") == 1


# Many policies on one trainer: nobody waits for a busier one's second step.

PEOPLE = 19
BATCHES = 4


async def test_a_batch_of_each_policy_comes_before_the_second_of_a_busy_one(client: Client) -> None:
    async with shared_trainer(client) as trainer:
        busy = Learner(client, trainer.add())
        busy.scripted.gate.clear()
        await busy.samples(BATCHES * busy.scripted.needed)
        await until(lambda: bool(trainer.turns))  # its first step is being computed
        others = [Learner(client, trainer.add()) for _ in range(PEOPLE)]
        for learner in others:
            await learner.samples(learner.scripted.needed)
        await all_queued(others)
        busy.scripted.gate.set()
        await until(lambda: len(trainer.turns) == PEOPLE + BATCHES)
        turns = [(turn.policy, turn.n) for turn in trainer.turns]
    assert turns[0] == (busy.policy, 1)
    assert sorted(turns[1 : PEOPLE + 1]) == sorted((learner.policy, 1) for learner in others)
    assert turns[PEOPLE + 1 :] == [(busy.policy, n) for n in range(2, BATCHES + 1)]


async def test_who_comes_later_waits_for_one_step_of_each_of_the_others(client: Client) -> None:
    async with shared_trainer(client) as trainer:
        busy, slow, late = (Learner(client, trainer.add()) for _ in range(3))
        slow.scripted.gate.clear()
        await busy.samples(busy.scripted.needed)
        await until(lambda: busy.scripted.head == 1)
        await slow.samples(slow.scripted.needed)
        await until(lambda: len(trainer.turns) == 2)  # the trainer is taken
        await busy.samples(2 * busy.scripted.needed)
        await all_queued([busy])
        await late.samples(late.scripted.needed)
        await all_queued([late])
        slow.scripted.gate.set()
        await until(lambda: len(trainer.turns) == 5)
        turns = [(turn.policy, turn.n) for turn in trainer.turns]
    assert turns[:2] == [(busy.policy, 1), (slow.policy, 1)]
    assert turns.index((late.policy, 1)) < turns.index((busy.policy, 3))  # the second had asked before it


# Probes on Temporal's real development server: an attempt goes on where the one before was.

QUEUE = "one-probing"


@workflow.defn(name="OneProbing")
class OneProbing:
    @workflow.run
    async def run(self, request: ProbeVersion) -> VersionProbed:
        options = PROBE.copy()
        options["task_queue"] = QUEUE
        return await workflow.execute_activity_method(ProbeActivities.probe_version, request, **options)


@workflow.defn(name="OneAsking")
class OneAsking:
    @workflow.run
    async def run(self, request: AskBase) -> BaseAsked:
        options = ASK_BASE.copy()
        options["task_queue"] = QUEUE
        return await workflow.execute_activity_method(ProbeActivities.ask_general_questions, request, **options)


class SixProbes:
    """Satisfies `ProbeStore`."""

    def __init__(self) -> None:
        contents = [ProbeContent(messages=[{"role": "user", "content": f"{n}"}], contains=["four"]) for n in range(6)]
        self.probes = [AskedProbe(uuid4(), content) for content in contents]
        self.checks: list[GateCheck] = []
        self.known: list[str] | None = None

    async def lacks_general(self, policy: str) -> bool:
        return self.known is None

    async def keep_general(self, policy: str, known: Sequence[ProbeContent]) -> None:
        self.known = [str(content.messages[0]["content"]) for content in known]

    async def plan(self, policy: str, n: int) -> ProbePlan | None:
        return ProbePlan(
            policy=policy,
            base_model="tiny",
            candidate=VersionRef(policy, n, n - 1, "path", "0" * 64),
            parent=n - 1,
            recipe=Recipe(name="r", gate=Gate(general_probes=False)),
            probes=self.probes,
        )

    async def record(self, policy: str, n: int, checks: Sequence[GateCheck]) -> None:
        self.checks += checks


class EngineThatRestarts:
    """Answers probes; it is away for one request, that of the fifth probe."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.was_away = False

    async def answer(self, policy: str, version: int, content: ProbeContent, max_tokens: int) -> ProbeAnswer:
        question = str(content.messages[-1]["content"])
        if question == "4" and not self.was_away:
            self.was_away = True
            raise EngineUnavailable("it restarts")
        self.asked[question] += 1
        return ProbeAnswer("four" if version == 0 else "five")


async def test_an_attempt_asks_only_what_the_one_before_did_not(client: Client) -> None:
    store, engine = SixProbes(), EngineThatRestarts()
    activities = ProbeActivities(
        store, engine.answer, engine.answer, always_thinks, JudgeClient(lambda policy: [], AnswerForm.GRAMMAR)
    )
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[OneProbing],
        activities=[activities.probe_version],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        request = ProbeVersion(policy="default", n=1)
        probed = await client.execute_workflow(OneProbing.run, request, id=f"probing-{uuid4()}", task_queue=QUEUE)
    assert (probed.asked, probed.failed) == (6, True)
    (check,) = store.checks
    assert (check.figures["parent_right"], check.figures["right"]) == (1.0, 0.0)
    assert engine.was_away
    # Two are asked at a time: at least three of the first four had both answers when the fifth failed.
    assert sum(engine.asked[question] == 2 for question in "0123") >= 3


async def always_thinks(policy: str) -> Thinking:
    return Thinking.ALWAYS


class BaseThatRestarts:
    """Knows two things; it is away for one request, the hundredth."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.was_away = False

    async def answer(self, policy: str, version: int, content: ProbeContent, max_tokens: int) -> ProbeAnswer:
        if len(self.asked) == 99 and not self.was_away:
            self.was_away = True
            raise EngineUnavailable("it restarts")
        self.asked[str(content.messages[0]["content"])] += 1
        return ProbeAnswer("Paris, or honey")


async def test_the_base_model_is_asked_each_general_question_once_though_the_engine_was_away(client: Client) -> None:
    store, base = SixProbes(), BaseThatRestarts()
    judge = JudgeClient(lambda policy: [], AnswerForm.GRAMMAR)
    activities = ProbeActivities(store, base.answer, base.answer, always_thinks, judge)
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[OneAsking],
        activities=[activities.ask_general_questions],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        asked = await client.execute_workflow(
            OneAsking.run, AskBase(policy="default"), id=f"asking-{uuid4()}", task_queue=QUEUE
        )
    assert base.was_away
    assert (asked.asked, asked.known, len(base.asked)) == (123, 4, 123)
    # What is known was asked twice, and once more if the engine was away in between.
    assert sum(times > 1 for times in base.asked.values()) == 4
    assert max(base.asked.values()) <= 3
    assert store.known == [
        "What is the capital of France?",
        "What do bees make?",
        "Was ist die Hauptstadt von Frankreich?",
        "¿Cuál es la capital de Francia?",
    ]


class ForgettingEngine:
    """Answers probes; each version answers three probes more wrongly than the one before."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, str]] = Counter()

    async def answer(self, policy: str, version: int, content: ProbeContent, max_tokens: int) -> ProbeAnswer:
        question = str(content.messages[-1]["content"])
        self.asked[version, question] += 1
        return ProbeAnswer("five" if int(question) < 3 * version else "four")


async def test_what_versions_lose_one_after_the_other_is_seen_beside_the_base_model_which_is_asked_once() -> None:
    store, engine = SixProbes(), ForgettingEngine()
    activities = ProbeActivities(
        store, engine.answer, engine.answer, always_thinks, JudgeClient(lambda policy: [], AnswerForm.GRAMMAR)
    )
    probed = [await activities.probe_version(ProbeVersion(policy="default", n=n)) for n in (1, 2)]
    assert [(each.asked, each.failed) for each in probed] == [(6, False), (6, True)]
    assert probed[1].reason.startswith("wrong content: 6 of 6 probes on which the version and the base model differ")
    assert [check.figures["base_right"] for check in store.checks] == [None, 1.0]
    assert set(engine.asked.values()) == {1}
    assert len(engine.asked) == 18


async def test_the_base_model_is_asked_at_once_and_the_first_version_waits_for_its_answers(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.general_unasked = scripted.probed = True
    scripted.base.clear()
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.begin()
        await until(lambda: "ask the base model" in scripted.happened)
        await learner.samples(32)
        await until(lambda: "train 1" in scripted.happened)
        scripted.base.set()
        await until(lambda: scripted.version == 2)
    decisive = [each for each in scripted.happened if each.startswith(("the base", "probe", "decide", "ask"))]
    assert decisive == [
        "ask the base model",
        "the base model answered",
        "probe 1",
        "decide 1: accepted",
        "probe 2",
        "decide 2: accepted",
    ]


async def test_a_base_model_that_can_never_be_asked_holds_up_no_version(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.general_unasked = scripted.probed = True
    scripted.base_fails = ApplicationError("there is no such policy", type="RecordUnusable", non_retryable=True)
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(16)
        await until(lambda: scripted.version == 1)
    assert scripted.happened.count("ask the base model") == 1


async def test_probes_that_are_added_while_a_step_is_computed_are_asked(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.gate.clear()
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(16)
        await until(lambda: scripted.at_once == 1)
        scripted.probed = True
        scripted.gate.set()
        await until(lambda: scripted.version == 1)
    assert "probe 1" in scripted.happened


def test_waiting_for_a_judge_worker_is_no_part_of_a_probings_time() -> None:
    assert "schedule_to_close_timeout" not in PROBE
    assert "schedule_to_start_timeout" not in PROBE


# A trainer, its disk or PostgreSQL is gone for a day: nothing gives up, and no history grows by waiting.

# Attempts of a day: the first follow each other faster, the others each minute.
DAY = 1440


async def events(learner: Learner) -> int:
    return len((await learner.handle.fetch_history()).events)


async def test_no_time_ends_a_steps_wait_for_its_trainer(client: Client) -> None:
    scripted = ScriptedLearning()
    learner = Learner(client, scripted)
    async with learning(client, scripted, trainer=False):
        await learner.samples(scripted.needed)
        await until(lambda: "claim 1: 16" in scripted.happened)
        await learner.shows("step 1")
        history = await learner.handle.fetch_history()
        scheduled = [
            event.activity_task_scheduled_event_attributes
            for event in history.events
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        (step,) = (found for found in scheduled if found.activity_type.name == "train_step")
        assert not step.schedule_to_start_timeout.ToTimedelta()
        assert not step.schedule_to_close_timeout.ToTimedelta()
        assert step.retry_policy.maximum_attempts == 0
        assert step.retry_policy.maximum_interval.ToTimedelta() == timedelta(minutes=1)
        assert not history.events[0].workflow_execution_started_event_attributes.workflow_run_timeout.ToTimedelta()
        async with training(client, scripted):
            await until(lambda: scripted.version == 1)
    assert scripted.happened.count("claim 1: 16") == 1


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        pytest.param(StoreUnavailable("PostgreSQL is away"), 30, id="postgresql, 30 times"),
        *(
            pytest.param(error, DAY, marks=pytest.mark.long, id=f"{name}, a day")
            for name, error in {
                "postgresql": StoreUnavailable("PostgreSQL is away"),
                "disk that cannot be written": write_error(1, OSError(errno.EIO, "Input/output error")),
                "disk that cannot be read": AdapterUnreadable("default/v1 cannot be read: Input/output error"),
            }.items()
        ),
    ],
)
async def test_a_step_that_fails_for_a_day_is_committed_afterwards_from_the_same_batch(
    client: Client, attempts: int, error: ClawloopError
) -> None:
    scripted = ScriptedLearning()
    gone = [
        ApplicationError(str(error), type=type(error).__name__, next_retry_delay=timedelta(milliseconds=1))
    ] * attempts
    scripted.fails = lambda n: gone.pop() if gone else None
    learner = Learner(client, scripted)
    async with learning(client, scripted, trainer=False):
        await learner.samples(scripted.needed)
        await until(lambda: "claim 1: 16" in scripted.happened)
        await learner.shows("step 1")
        before = await events(learner)
        async with training(client, scripted):
            await until(lambda: not gone, seconds=300)
            await until(lambda: scripted.version == 1)
            assert await events(learner) <= before + 40  # as without failures: a retry is no event
    assert scripted.happened.count("train 1") == attempts + 1
    assert scripted.happened.count("claim 1: 16") == 1


async def test_what_an_absent_judge_missed_is_judged_once_it_is_back_and_an_operator_asks(
    client: Client, binary_bench: Bench
) -> None:
    b = binary_bench
    # Transient, unlike a refusal; its own pause stands for the minutes between attempts.
    b.judge.mode, b.judge.retry_after = "503", "0.01"
    async with at_work(client, b):
        session, turns = await end_unjudged(client, b)
        assert b.rows("SELECT * FROM samples") == []
        assert (
            await _most_attempts(client, names.session_workflow_id(session)) == JUDGE["retry_policy"].maximum_attempts
        )

        b.judge.mode, b.judge.retry_after = "well", None
        said = await clawloop(client, b, "--unjudged")
        assert said.stdout.count("is judged again") == 2, said.stdout
        await until(lambda: len(b.rows("SELECT * FROM samples")) == 2)
    assert [(await b.turn(turn.turn_id)).outcome for turn in turns] == ["sampled", "sampled", "no_feedback"]


async def _most_attempts(client: Client, workflow_id: str) -> int:
    """Of the activity of a workflow's run that was tried most often."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    return max(event.activity_task_started_event_attributes.attempt for event in history.events)
