"""Probes in PostgreSQL, and the activity that asks them of an engine and a judge over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from activities.training.gate import DecideVersion, GateActivities
from activities.training.probe_version import AskBase, ProbeActivities, ProbeVersion
from clawloop.core.contracts.serving import Directory, Engine, Policy
from clawloop.core.contracts.training import CheckResult, GateCheck, ProbeContent, StepState
from clawloop.core.errors import EngineUnavailable, NotFound, StateConflict
from clawloop.core.families.template import Thinking
from clawloop.core.gate.checks import AskedProbes
from clawloop.core.gate.gate import BY_PROBES, Check
from clawloop.core.ids import new_probe_id
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import WITHOUT_JUDGE, Gate
from clawloop.core.turns.files import STORED
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from clawloop.serving.probes import ProbeClient
from db.training.probes import PostgresProbeStore
from tests.contract.learning import POLICY, RECIPE, PostgresLearning, trained
from tests.fakes.engine import serving
from tests.pictures import asks_about, png


def gate(**keys: Any) -> Gate:
    return Gate(**{"general_probes": False} | keys)


def asks(text: str, **checks: Any) -> ProbeContent:
    return ProbeContent(messages=[{"role": "user", "content": text}], **checks)


class Machine:
    """An engine with two versions, and the judge, over HTTP.

    Attributes:
        says: the answer to a prompt, by the model's name.
        knows: the answer of any version to a question.
        better: a text that the judge prefers wherever it stands.
        status: of each answer to a probe.
        thinks: the model's thinking mode.
    """

    def __init__(self) -> None:
        self.says = {"tiny": "four", "default-v1": "four"}
        self.knows: dict[str, str] = {}
        self.better = "nothing"
        self.status = 200
        self.thinks = Thinking.OPTIONAL
        self.asked: list[dict[str, Any]] = []

    async def thinking(self, policy: str) -> Thinking:
        return self.thinks

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        question = str(body["messages"][-1]["content"])
        if "structured_outputs" in body:
            first, _, second = question.partition("</first")
            text = "first" if self.better in first else "second" if self.better in second else "equal"
        else:
            self.asked.append(body)
            if self.status != 200:
                return JSONResponse({"error": {}}, self.status)
            text = self.knows.get(question, self.says[body["model"]])
        message = {"role": "assistant", "content": text}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}]})


@asynccontextmanager
async def probing(learning: PostgresLearning, machine: Machine, loaded: set[int]) -> AsyncIterator[ProbeActivities]:
    async with serving(Starlette(routes=[Route("/v1/chat/completions", machine.chat, methods=["POST"])])) as url:
        directory = Directory(
            (Policy(POLICY, "tiny", (), 0, {}),), (Engine("e1", url, {POLICY: frozenset(loaded)}, draining=False),)
        )
        async with (
            ProbeClient(lambda: directory, lambda: "secret") as engines,
            JudgeClient(lambda policy: [Endpoint(url, "tiny")], AnswerForm.GRAMMAR) as judge,
        ):
            yield ProbeActivities(
                PostgresProbeStore(learning.database),
                engines.answer,
                partial(engines.answer, temperature=0.6, after_chats=True),
                machine.thinking,
                judge,
            )


async def candidate(learning: PostgresLearning) -> None:
    """Version 1 waits for the gate."""
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    batch = await learning.steps.batch(POLICY, 1)
    assert await learning.steps.commit(batch, trained(batch)) is StepState.CANDIDATE


async def test_probes_are_kept_in_their_order_and_bounded(postgres_learning: PostgresLearning) -> None:
    store = PostgresProbeStore(postgres_learning.database)
    await postgres_learning.set_recipe(RECIPE.model_copy(update={"gate": gate()}))
    assert not (await postgres_learning.steps.status(POLICY)).probed
    content = asks("2 + 2?", contains=("4",), regex=r"\d", exact="4", tools=[{"type": "function"}])
    first, second = await store.add(POLICY, [content, asks("Hello")], 3)
    assert (first.content.contains, first.content.regex, first.content.exact) == (["4"], r"\d", "4")
    assert first.content.tools == [{"type": "function"}]
    assert (await postgres_learning.steps.status(POLICY)).probed
    with pytest.raises(StateConflict, match="has 2 probes and can have 3"):
        await store.add(POLICY, [asks("a"), asks("b")], 3)
    assert [probe.id for probe in await store.all(POLICY)] == [first.id, second.id]
    assert await store.remove(POLICY, first.id)
    assert not await store.remove(POLICY, new_probe_id())
    for call in (store.all("other"), store.add("other", [], 3), store.remove("other", second.id)):
        with pytest.raises(NotFound, match="There is no policy 'other'"):
            await call


async def test_the_recipe_of_the_open_step_says_whether_its_version_is_probed(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    drawing, plain = (RECIPE.model_copy(update={"gate": gate(drawn_probes=drawn)}) for drawn in (12, 0))
    await learning.set_recipe(drawing)
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    await learning.set_recipe(plain)
    assert (await learning.steps.status(POLICY)).probed
    await learning.steps.abandon(POLICY, 1, "why")
    assert not (await learning.steps.status(POLICY)).probed
    await learning.steps.claim(POLICY, 2)
    await learning.set_recipe(drawing)
    assert not (await learning.steps.status(POLICY)).probed


async def test_a_second_check_by_probes_counts_too(
    postgres_learning: PostgresLearning, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = postgres_learning

    def find(asked: AskedProbes, gate: Gate) -> GateCheck:
        return GateCheck("manners", CheckResult.FAILED, "rude", {})

    monkeypatch.setattr("activities.training.probe_version.BY_PROBES", (*BY_PROBES, Check("manners", find, ())))
    await PostgresProbeStore(learning.database).add(POLICY, [asks(f"{n}", contains=["four"]) for n in range(8)], 200)
    await candidate(learning)
    async with probing(learning, Machine(), {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert probed.failed
    assert probed.reason.endswith("; rude")
    checks = await learning.gate.checks(POLICY, 1)
    assert [(check.name, check.result) for check in checks] == [
        ("manners", CheckResult.FAILED),
        ("probes", CheckResult.PASSED),
    ]


async def test_a_version_that_forgot_is_rejected_with_its_figures(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    await PostgresProbeStore(learning.database).add(POLICY, [asks(f"{n}", contains=["four"]) for n in range(8)], 200)
    await candidate(learning)
    machine.says["default-v1"] = "five"
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
        assert (probed.asked, probed.failed) == (8, True)
        assert await activities.probe_version(ProbeVersion(policy=POLICY, n=1)) == probed.model_copy(
            update={"asked": 0, "failed": False, "reason": ""}
        )
    assert {(asked["model"], asked["temperature"], asked["max_tokens"]) for asked in machine.asked} == {
        ("tiny", 0.0, 256),
        ("default-v1", 0.0, 256),
    }
    decided = await GateActivities(learning.gate).decide_version(DecideVersion(policy=POLICY, n=1))
    assert decided.state is StepState.REJECTED
    assert decided.reason.startswith("rejected: probes: wrong content: 8 of 8 probes")
    (_, version) = await learning.operators.versions(POLICY)
    (check,) = version.gate
    assert (check.result, check.figures["parent_right"], check.figures["right"]) == (CheckResult.FAILED, 1.0, 0.0)
    seconds = check.figures["seconds"]
    assert seconds is not None
    assert version.gate_seconds == seconds > 0
    assert f", seconds {seconds:.3g}" in decided.checks


@pytest.mark.parametrize(("content_loss", "state"), [(1.0, StepState.COMMITTED), (0.1, StepState.REJECTED)])
async def test_the_recipe_bounds_what_a_version_may_lose(
    postgres_learning: PostgresLearning, content_loss: float, state: StepState
) -> None:
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate(content_loss=content_loss)}))
    both = [asks(f"{n}", regex="four|five") for n in range(8)]
    lost = [asks(f"{n}", contains=["four"]) for n in range(2)]
    await PostgresProbeStore(learning.database).add(POLICY, [*both, *lost], 200)
    await candidate(learning)
    machine.says["default-v1"] = "five"
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    decided = await GateActivities(learning.gate).decide_version(DecideVersion(policy=POLICY, n=1))
    assert (probed.failed, decided.state) == (state is StepState.REJECTED, state)
    if state is StepState.REJECTED:
        assert decided.reason == (
            "rejected: probes: lost content: 2 of 10 probes beside the base model, limit 0.1 (gate.content_loss)"
        )


async def test_praised_turns_are_asked_again_and_compared_in_both_orders(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate(drawn_probes=12, probe_tokens=32)}))
    assert (await learning.steps.status(POLICY)).probed
    await learning.add_samples(12)
    await candidate(learning)
    machine.says["default-v1"], machine.better = "five", "four"
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert (probed.asked, probed.failed) == (12, True)
    assert probed.reason.startswith("answers the judge likes less: 12 of 12")
    assert machine.asked[0]["max_tokens"] == 32


async def test_answers_are_compared_by_no_judge_where_the_recipe_asks_none(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    changes = {"gate": Gate(drawn_probes=12), "signal": WITHOUT_JUDGE.signal}
    await learning.set_recipe(RECIPE.model_copy(update=changes))
    await learning.add_samples(12)
    await candidate(learning)
    machine.says["default-v1"], machine.better = "five", "four"
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert (probed.asked, probed.failed) == (12, False)
    assert "the judge" not in probed.reason


async def test_turns_whose_messages_have_files_are_passed_over_for_the_next_ones(
    postgres_learning: PostgresLearning,
) -> None:
    """An engine takes no reference in place of an image; a judge that sees and learns has samples of such turns."""
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate(drawn_probes=4)}))
    await learning.add_samples(4)
    await learning.add_samples(24, messages=[asks_about(png())])
    await candidate(learning)
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert probed.asked == 4
    assert STORED not in str(machine.asked)


async def test_where_no_turn_was_praised_yet_the_gate_says_that_nothing_was_asked(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate(drawn_probes=12)}))
    await candidate(learning)  # all that was praised is in the step's own batch
    async with probing(learning, Machine(), {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    (check,) = (await learning.operators.versions(POLICY))[1].gate
    assert (probed.asked, check.result) == (0, CheckResult.NOT_ENOUGH)
    assert check.reason == probed.reason == "not asked: there is no probe, nor a praised turn to ask again"


async def test_equal_answers_are_a_tie_without_the_judge(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    await PostgresProbeStore(learning.database).add(POLICY, [asks(f"{n}") for n in range(10)], 200)
    await candidate(learning)
    machine.better = "four"
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert (probed.failed, "prefers it 0 times, its parent 0 times of 10" in probed.reason) == (False, True)


async def test_without_an_engine_that_has_it_the_version_waits_and_is_then_decided_by_the_rest(
    postgres_learning: PostgresLearning,
) -> None:
    learning, machine = postgres_learning, Machine()
    await PostgresProbeStore(learning.database).add(POLICY, [asks("one", contains=["four"])], 200)
    await candidate(learning)
    async with probing(learning, machine, set()) as activities:
        with pytest.raises(EngineUnavailable, match="no engine has version 1 of default"):
            await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    decide = DecideVersion(policy=POLICY, n=1, not_probed="no engine has version 1 of default")
    decided = await GateActivities(learning.gate).decide_version(decide)
    assert (decided.state, decided.checks) == (StepState.COMMITTED, "probes not enough: asked 0")
    (_, version) = await learning.operators.versions(POLICY)
    assert version.gate[0].reason == "not asked: no engine has version 1 of default"


async def test_probes_that_the_engine_refuses_are_left_out_and_counted(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate()}))
    await PostgresProbeStore(learning.database).add(POLICY, [asks("one", contains=["four"])], 200)
    await candidate(learning)
    machine.status = 400
    async with probing(learning, machine, {1}) as activities:
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert (probed.asked, probed.reason) == (0, "not asked: 1 probes: the engine refused (400)")


# General questions ----------------------------------------------------------------------------------------------------


ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 2 + 2?": "2 + 2 = 4",
    "How many days are in a week?": "Seven.",
    "What color is grass?": "**Green**",
    "Which planet is known as the Red Planet?": "Mars",
    "Was ist die Hauptstadt von Deutschland?": "Das ist Berlin.",
    "¿Cuál es la capital de España?": "Madrid",
    "What do bees make?": "Bees make honey, of course.",
}


async def test_the_base_model_is_asked_once_and_what_it_knows_watches_over_its_versions(
    postgres_learning: PostgresLearning,
) -> None:
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(content_loss=0.05)}))
    store = PostgresProbeStore(learning.database)
    (own,) = await store.add(POLICY, [asks("mine", contains=["four"])], 1)
    assert (await learning.steps.status(POLICY)).general_unasked
    machine.says["tiny"], machine.knows = "I do not know.", ANSWERS
    async with probing(learning, machine, {1}) as activities:
        asked = await activities.ask_general_questions(AskBase(policy=POLICY))
        assert (asked.asked, asked.known) == (123, len(ANSWERS))
        assert {
            (each["model"], each["temperature"], each["max_tokens"], each["priority"] > time.time() + 600)
            for each in machine.asked
        } == {("tiny", 0.6, 24, True)}
        assert len(machine.asked) == 123 + len(ANSWERS)  # those that are right once are asked again
        assert not (await learning.steps.status(POLICY)).general_unasked
        assert (await activities.ask_general_questions(AskBase(policy=POLICY))).asked == 0
        assert len(machine.asked) == 123 + len(ANSWERS)
        stored = await store.all(POLICY)
        assert [probe.id for probe in stored if not probe.general] == [own.id]
        questions = {str(probe.content.messages[0]["content"]) for probe in stored if probe.general}
        assert questions == set(ANSWERS)
        await store.remove(POLICY, own.id)
        await store.add(POLICY, [asks("another")], 1)  # ours do not count towards what an operator may have
        await candidate(learning)
        machine.knows, machine.asked = {}, []
        machine.says = {"tiny": "4, 7, Paris, Mars, green, Berlin, Madrid, honey", "default-v1": "I do not know."}
        await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    general = [each for each in machine.asked if each["messages"][0]["content"] != "another"]
    thought_about = [each for each in general if "chat_template_kwargs" not in each]
    assert ([each["max_tokens"] for each in thought_about], len(general)) == ([1024] * 4, 16)
    assert {each["max_tokens"] for each in general if each not in thought_about} == {48}
    decided = await GateActivities(learning.gate).decide_version(DecideVersion(policy=POLICY, n=1))
    assert decided.reason.startswith("rejected: probes: wrong content: 8 of 8 probes on which")
    (check,) = (await learning.operators.versions(POLICY))[1].gate
    assert (check.figures["general"], check.figures["general_right"]) == (8, 0.0)


async def test_a_base_model_that_knows_too_little_is_not_watched_and_the_check_says_so(
    postgres_learning: PostgresLearning,
) -> None:
    learning, machine = postgres_learning, Machine()
    machine.says["tiny"], machine.knows = "I do not know.", dict(list(ANSWERS.items())[:3])
    async with probing(learning, machine, {1}) as activities:
        assert (await activities.ask_general_questions(AskBase(policy=POLICY))).known == 3
        await candidate(learning)
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert await PostgresProbeStore(learning.database).all(POLICY) == []
    assert (probed.asked, probed.reason) == (
        0,
        "not asked: the base model knows 3 of 123 general questions, and 8 are needed to watch its content by them",
    )


async def test_the_verdicts_on_replies_say_whether_longer_ones_are_wanted(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    await learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(length_growth=1.2)}))
    machine.says["tiny"], machine.knows = "I do not know.", ANSWERS
    store = PostgresProbeStore(learning.database)
    await learning.add_samples(20)
    await candidate(learning)
    plan = await store.plan(POLICY, 1)
    assert plan is not None
    assert [reply.verdict for reply in plan.judged] == [1] * len(plan.judged)
    assert len(plan.judged) >= 20
    assert all(reply.tokens > 0 for reply in plan.judged)
    machine.thinks = Thinking.NEVER
    async with probing(learning, machine, {1}) as activities:
        await activities.ask_general_questions(AskBase(policy=POLICY))
        machine.knows = {}
        machine.asked.clear()
        machine.says["tiny"] = "4, 7, Paris, Mars, green, Berlin, Madrid, honey"
        machine.says["default-v1"] = f"{machine.says['tiny']} {' '.join(str(n) for n in range(100, 200))}"
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    # A model that cannot think is given no tokens for it.
    assert {each["max_tokens"] for each in machine.asked} == {48}
    assert (probed.failed, probed.reason) == (
        True,
        "longer answers: 108 words at the median, the base model's 8, limit 1.2 times (gate.length_growth); "
        "longer replies are not liked better",
    )


async def test_replies_that_nobody_judges_or_rates_leave_growth_to_the_limit(
    postgres_learning: PostgresLearning,
) -> None:
    learning, machine = postgres_learning, Machine()
    machine.says["tiny"], machine.knows = "I do not know.", ANSWERS
    await candidate(learning)
    await learning.execute("UPDATE judgements SET verdict = NULL")
    async with probing(learning, machine, {1}) as activities:
        await activities.ask_general_questions(AskBase(policy=POLICY))
        machine.knows = {}
        machine.says["tiny"] = "4, 7, Paris, Mars, green, Berlin, Madrid, honey"
        machine.says["default-v1"] = f"{machine.says['tiny']} {' '.join(str(n) for n in range(100, 200))}"
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert probed.failed
    assert probed.reason.endswith("0 verdicts or ratings say whether longer ones are liked better, 16 are needed")


async def test_a_recipe_may_leave_the_general_questions_out(postgres_learning: PostgresLearning) -> None:
    learning, machine = postgres_learning, Machine()
    machine.knows = ANSWERS
    async with probing(learning, machine, {1}) as activities:
        await activities.ask_general_questions(AskBase(policy=POLICY))
        await learning.set_recipe(RECIPE.model_copy(update={"gate": gate()}))
        status = await learning.steps.status(POLICY)
        assert (status.probed, status.general_unasked) == (False, False)
        await candidate(learning)
        probed = await activities.probe_version(ProbeVersion(policy=POLICY, n=1))
    assert (probed.asked, probed.reason) == (0, "not asked: there is no probe, nor a praised turn to ask again")
