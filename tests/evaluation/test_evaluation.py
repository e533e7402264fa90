"""`clawloop evaluate` from end to end: the real gateway, a scripted engine, and a persona and grader over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawloop.app.cli.evaluate import check_policy, learned
from clawloop.app.evaluation.clients import ModelClient, NoAnswer
from clawloop.app.evaluation.run import Evaluation, Models, evaluate, grade, split
from clawloop.app.evaluation.settings import MOST_TURNS, SETTINGS, STUDENT, TEACHER, SettingName
from clawloop.app.evaluation.tasks import own_tasks
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.errors import SetupError
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine, serving


class People:
    """Persona and grader.

    Attributes:
        says: what the persona says after each answer; the last one is repeated.
        grades: what the grader ends with, in order; the last one is repeated.
        finish: why an answer ends.
        refused_from: number of questions from which on the persona's account is empty; None: never.
        grader_is_away: whether it refuses all.
        tokens: what an answer could have, of the last question.
    """

    tokens: int

    def __init__(self, says: list[str], grades: list[str]) -> None:
        self.says, self.grades = says, grades
        self.asked: list[list[dict[str, Any]]] = []
        self.finish = "stop"
        self.refused_from: int | None = None
        self.grader_is_away = False

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.tokens = body["max_tokens"]
        if self.grader_is_away or (body["model"] == "persona" and len(self.asked) == self.refused_from):
            return JSONResponse({"error": {"message": "out of credit"}}, 402)
        if body["model"] == "persona":
            self.asked.append(body["messages"])
            said = sum(message["role"] == "assistant" for message in body["messages"])
            text = self.says[min(said, len(self.says)) - 1]
        else:
            text = f"As wanted.\nscore: {self.grades[0]}"
            self.grades = self.grades[1:] or self.grades
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


@asynccontextmanager
async def everyone(people: People, gateway: Gateway) -> AsyncIterator[Models]:
    async with serving(Starlette(routes=[Route("/v1/chat/completions", people.chat, methods=["POST"])])) as url:
        async with (
            ModelClient("the policy", gateway.url, "policy", gateway.key) as policy,
            ModelClient("the persona", url, "persona", None, answer_tokens=77) as persona,
            ModelClient("the grader", f"{url}/v1", "grader", "secret", answer_tokens=78) as grader,
        ):
            yield Models(policy, persona, grader)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine]) as running:
        yield running


async def run(people: People, gateway: Gateway, setting: SettingName, sessions: int = 2) -> Evaluation:
    learned = False

    async def wait() -> None:
        nonlocal learned
        learned = True

    chats, held_out = split(own_tasks(), sessions, 4)
    async with everyone(people, gateway) as models:
        found = await evaluate(SETTINGS[setting], models, chats, held_out, wait, lambda line: None)
    assert learned
    return found


async def test_a_student_chats_and_is_graded_before_and_after(gateway: Gateway) -> None:
    people = People(["No bold please.", "Append it to the file.", "DONE"], ["0.25"] * 4 + ["0.75"])
    found = await run(people, gateway, SettingName.STUDENT)
    assert (found.sessions, found.completed, found.turns) == (2, 2, 6)
    assert (found.before["by_model"].mean, found.after["by_model"].mean) == (0.25, 0.75)
    assert (found.changes["by_model"].mean, found.changes["by_model"].low) == (0.5, 0.5)
    assert found.before["by_rules"].mean == 1.0  # "Hello there, friend." has no mark of an AI
    assert found.before["right"].mean == 0.0
    json.dumps(found.as_json())

    records = await gateway.recorded(16)
    main = [record for record in records if record.kind is TurnKind.MAIN]
    assert len(main) == 8  # three answers, and a last message by which the third is judged
    assert sum(record.ends_session for record in main) == 2
    assert sum(record.kind is TurnKind.SIDE for record in records) == 8
    asked = people.asked[1]
    assert [message["role"] for message in asked][:4] == ["system", "user", "assistant", "user"]
    assert "must not be found" in asked[0]["content"]


async def test_a_teacher_who_is_never_content_ends_after_eight_answers(gateway: Gateway) -> None:
    found = await run(People(["Be friendlier."], ["nothing", "0.5"]), gateway, SettingName.TEACHER, sessions=1)
    assert (found.completed, found.turns) == (0, MOST_TURNS)
    assert (found.before["by_model"].count, found.before["right"].count) == (3, 0)
    assert found.changes["right"].mean is None


async def test_a_persona_that_says_nothing_ends_a_session_and_praises_nothing(gateway: Gateway) -> None:
    found = await run(People(["No bold please.", ""], ["1"]), gateway, SettingName.STUDENT, sessions=1)
    assert (found.completed, found.turns) == (0, 2)
    records = await gateway.recorded(11)
    ended = [record for record in records if record.ends_session]
    assert [record.kind for record in ended] == [TurnKind.SIDE]
    assert sum(record.kind is TurnKind.MAIN for record in records) == 2


async def test_a_model_that_refuses_ends_it_with_its_name_and_reason(gateway: Gateway) -> None:
    async with everyone(People(["DONE"], ["1"]), gateway) as models:
        async with ModelClient("the policy", gateway.url, "another", gateway.key) as wrong:
            asking = Models(wrong, models.persona, models.grader)
            with pytest.raises(SetupError, match=r"the policy \(another at .*does not answer"):
                await evaluate(STUDENT, asking, [], own_tasks()[:1], _at_once, lambda line: None)


async def test_a_persona_that_fails_ends_the_sessions_and_keeps_what_was_found(gateway: Gateway) -> None:
    people = People(["No bold please.", "DONE"], ["0.25"] * 4 + ["0.75"])
    people.refused_from = 3
    found = await run(people, gateway, SettingName.STUDENT, sessions=3)
    assert (found.sessions, found.completed, found.turns) == (1, 1, 2)
    assert (found.before["by_model"].mean, found.after["by_model"].mean) == (0.25, 0.75)
    assert found.problem is not None
    assert found.problem.startswith("1 of 3 sessions: the persona (persona at ")
    assert "out of credit" in found.problem


async def test_grades_before_are_kept_where_none_can_be_given_afterwards(gateway: Gateway) -> None:
    people = People(["DONE"], ["0.25"])
    async with everyone(people, gateway) as models:

        async def ends() -> None:
            people.grader_is_away = True

        found = await evaluate(STUDENT, models, [], own_tasks()[:2], ends, lambda line: None)
    assert (found.before["by_model"].mean, found.after, found.changes) == (0.25, {}, {})
    assert found.problem is not None
    assert found.problem.startswith("not graded again: the grader (grader at ")


async def test_nobody_asks_on_when_a_grader_does_not_answer(gateway: Gateway) -> None:
    people = People(["DONE"], ["0.25"])
    people.grader_is_away = True
    async with everyone(people, gateway) as models:
        before = asyncio.all_tasks()
        with pytest.raises(NoAnswer):
            await grade(STUDENT, models, own_tasks()[:8])
        running = [task.get_coro() for task in asyncio.all_tasks() - before]
    assert [name for one in running if (name := getattr(one, "__qualname__", "")).startswith("grade")] == []


async def test_what_was_found_is_kept_where_nobody_can_say_whether_it_is_learned(gateway: Gateway) -> None:
    async def fails() -> None:
        raise SetupError("the gateway does not answer")

    async with everyone(People(["DONE"], ["0.25"]), gateway) as models:
        found = await evaluate(STUDENT, models, own_tasks()[2:3], own_tasks()[:2], fails, lambda line: None)
    assert (found.sessions, found.completed, found.after) == (1, 1, {})
    assert found.problem == "not graded again: the gateway does not answer"


async def test_a_wrong_policy_is_found_before_anybody_chats(gateway: Gateway) -> None:
    await check_policy(gateway.url, gateway.admin_key, "default")
    await check_policy(gateway.url, None, "mistyped")  # it is not asked for
    with pytest.raises(SetupError, match="mistyped"):
        await check_policy(gateway.url, gateway.admin_key, "mistyped")


async def test_answers_that_were_cut_are_counted_and_said(gateway: Gateway) -> None:
    people = People(["DONE"], ["0.25"])
    people.finish = "length"
    said: list[str] = []
    async with everyone(people, gateway) as models:
        found = await evaluate(STUDENT, models, [], own_tasks()[:2], _at_once, said.append)
    assert found.cut == {"policy": 0, "persona": 0, "grader": 4}
    assert people.tokens == 78
    assert "2 answers of the grader were cut at 78 tokens: raise --answer-tokens" in said


async def _at_once() -> None:
    pass


async def test_nobody_waits_for_training_that_is_paused(capsys: pytest.CaptureFixture[str]) -> None:
    judging = [3, 0]
    status = {"reason": "paused: 3 steps in a row", "ready": 20, "needed": 16, "step": 4, "version": 3, "head": 3}
    status |= {"policy": "default", "pinned": None}

    async def training(request: Request) -> Response:
        return JSONResponse(status | {"state": "paused", "judging": judging.pop(0)})

    async with serving(Starlette(routes=[Route("/admin/v1/training", training)])) as url:
        async with asyncio.timeout(60):
            await learned(url, "secret", "default", wait_minutes=60)
    assert judging == []  # what is not judged yet was waited for
    assert "training is paused: 3 steps in a row: graded again with what is learned" in capsys.readouterr().err


def test_the_settings_are_the_originals() -> None:
    assert (STUDENT.sessions, TEACHER.sessions) == (36, 24)
    chats, held_out = split(own_tasks(), STUDENT.sessions, 24)
    assert (len(chats), len(set(chats)), len(held_out)) == (36, 36, 24)
    assert not set(chats) & set(held_out)
    with pytest.raises(SetupError, match="60 tasks, but 60 are held out"):
        split(own_tasks(), 1, 60)
