"""Probes on Temporal's real development server: an attempt goes on where the one before was."""

from __future__ import annotations

from collections import Counter
from uuid import uuid4

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.probe_version import ProbeActivities, ProbeVersion, VersionProbed
from clawloop.core.contracts.training import AskedProbe, GateCheck, ProbeAnswer, ProbeContent, ProbePlan, VersionRef
from clawloop.core.errors import EngineUnavailable
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Recipe
from clawloop.serving.judge import JudgeClient
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning
from workflows.activity_options import PROBE

QUEUE = "one-probing"


@workflow.defn(name="OneProbing")
class OneProbing:
    @workflow.run
    async def run(self, request: ProbeVersion) -> VersionProbed:
        options = PROBE.copy()
        options["task_queue"] = QUEUE
        return await workflow.execute_activity_method(ProbeActivities.probe_version, request, **options)


class SixProbes:
    """Satisfies `ProbeStore`."""

    def __init__(self) -> None:
        contents = [ProbeContent(messages=[{"role": "user", "content": f"{n}"}], contains=["four"]) for n in range(6)]
        self.probes = [AskedProbe(uuid4(), content) for content in contents]
        self.checks: list[GateCheck] = []

    async def plan(self, policy: str, n: int) -> ProbePlan | None:
        return ProbePlan(
            policy=policy,
            base_model="tiny",
            candidate=VersionRef(policy, n, n - 1, "path", "0" * 64),
            parent=n - 1,
            recipe=Recipe(name="r"),
            probes=self.probes,
        )

    async def record(self, policy: str, n: int, check: GateCheck) -> None:
        self.checks.append(check)


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
    activities = ProbeActivities(store, engine.answer, JudgeClient(lambda policy: [], AnswerForm.GRAMMAR))
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
    activities = ProbeActivities(store, engine.answer, JudgeClient(lambda policy: [], AnswerForm.GRAMMAR))
    probed = [await activities.probe_version(ProbeVersion(policy="default", n=n)) for n in (1, 2)]
    assert [(each.asked, each.failed) for each in probed] == [(6, False), (6, True)]
    assert probed[1].reason.startswith("wrong content: 6 of 6 probes on which the version and the base model differ")
    assert [check.figures["base_right"] for check in store.checks] == [None, 1.0]
    assert set(engine.asked.values()) == {1}
    assert len(engine.asked) == 18


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
