"""`clawloop evaluate` from end to end: the real gateway over HTTP, and a stand-in model that learns by corrections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import clawloop.app.evaluation.run as run_module
from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.sessions import as_notes
from clawloop.app.evaluation.chart import tokens_by_session
from clawloop.app.evaluation.clients import ModelClient, NoAnswer
from clawloop.app.evaluation.figures import Row, RunFigure, sessions_by_luck
from clawloop.app.evaluation.homework import own_homework
from clawloop.app.evaluation.lines import LineFile, SessionLine
from clawloop.app.evaluation.run import Evaluation, Plan, is_complete, rows, with_lessons
from clawloop.app.evaluation.users import User
from clawloop.core.contracts.serving import Policy
from clawloop.core.contracts.training import BroughtAdapter, TrainingView
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.errors import SetupError
from clawloop.core.gate.general import general_questions
from clawloop.core.recipes.lessons import Lessons
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, Recipe
from db.serving.directory import DEFAULT_SAMPLING
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import PROMPT_IDS, fake_engine, serving
from tests.fakes.replies import Reply
from tests.verbs import clawloop, refusal

COLD, KIND = "The sum is wrong. Try again.", "Well done, you worked with care!"
KNOWN = [str(question.content.messages[-1]["content"]) for question in general_questions()[:16]]
ANSWERS = ["Paris", "Tokyo", "Rome", "Cairo", "Ottawa", "Madrid", "Germany", "Africa"]


@dataclass
class Pupil:
    """The stand-in model: it is kind once it was corrected often enough, or once a note is in its prompt.

    Attributes:
        needs: different corrections; sessions' main turns alone teach it.
        forgets: after learning it knows the first four facts alone.
        kind_anyway: as the base model.
    """

    needs: int
    forgets: bool = True
    kind_anyway: bool = False
    corrections: set[str] = field(default_factory=set)

    def reply(self, body: dict[str, Any]) -> Reply:
        messages = body["messages"]
        system = [message for message in messages if message["role"] == "system"]
        said = [str(message["content"]) for message in messages if message["role"] == "user"]
        if said[-1] in KNOWN:
            at = KNOWN.index(said[-1])
            knows = 4 if self.forgets and self._learned and not system else len(ANSWERS)
            return Reply(ANSWERS[at] if at < knows else "I do not know.")
        if len(said) > 1 and not system:
            self.corrections.update(said[1:])
        return Reply(KIND if system or self._learned or self.kind_anyway else COLD)

    @property
    def _learned(self) -> bool:
        return len(self.corrections) >= self.needs


def plan(**changed: Any) -> Plan:
    usual = Plan(
        like="default",
        recipes={"learning": None},
        notes=False,
        users=[User.TEACHER],
        homework=own_homework(),
        joint=False,
        seeds=1,
        limit=6,
        replies=2,
        answer_tokens=64,
        user_model=None,
    )
    return replace(usual, **changed)


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    few = general_questions()[: len(KNOWN)]
    monkeypatch.setattr(run_module, "general_questions", lambda: few)
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine]) as running:
        store = running.services.training_operations._store
        create = store.create_policy

        async def created(
            name: str, like: str, recipe: Recipe | None, version: int = 0, brought: BroughtAdapter | None = None
        ) -> TrainingView:
            view = await create(name, like, recipe, version, brought)
            policy = Policy(name, "tiny", ("qwen3-4b",), 0, dict(DEFAULT_SAMPLING))
            running.directory.add_policy(policy, frozenset())
            await running.services.directory.refresh()
            return view

        store.create_policy = created  # type: ignore[method-assign]
        yield running


async def run(
    gateway: Gateway,
    model: Pupil,
    asked: Plan,
    out: Path,
    player: ModelClient | None = None,
    stop_after: int | None = None,
) -> list[Row]:
    """
    Args:
        stop_after: number of lines in the file at which the run is killed.
    """
    gateway.engine.script = model.reply
    lines = LineFile(out, asked.settings())
    async with AdminClient(gateway.url, gateway.admin_key) as admin:
        evaluation = asyncio.create_task(
            Evaluation(asked, lines, gateway.url, admin, player, 1.0, lambda line: None).run()
        )
        while not evaluation.done():
            await asyncio.sleep(0.002)
            if stop_after is not None and len(out.read_bytes().splitlines()) >= stop_after:
                evaluation.cancel()
                await asyncio.gather(evaluation, return_exceptions=True)
                return rows(asked, lines)
        await evaluation
    assert is_complete(asked, lines)
    return rows(asked, lines)


def row(found: Sequence[Row], arm: str, user: str | None = "teacher") -> Row:
    return next(one for one in found if (one.arm, one.user) == (arm, user))


async def test_a_model_that_needs_four_corrections_is_there_in_the_fifth_session(
    gateway: Gateway, tmp_path: Path
) -> None:
    found = await run(gateway, Pupil(needs=4), plan(), tmp_path / "lines.jsonl")
    learned, frozen = row(found, "learning"), row(found, "frozen")
    assert learned.sessions is not None
    # Two sessions with two corrections each; the third to the fifth begin as wanted.
    assert (learned.sessions.mean, learned.reached, learned.runs) == (5, 1, 1)
    assert learned.facts is not None
    assert learned.facts.mean == 0.5
    assert frozen.facts is not None
    assert frozen.facts.mean == 1.0
    assert frozen.sessions is not None
    assert (frozen.sessions.mean, frozen.reached, frozen.base_rate, frozen.luck) == (6, 0, 0.0, None)

    held = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    sessions = [line for line in held if line.get("arm") == "learning" and line["kind"] == "session"]
    assert [line["session"] for line in sessions] == [1, 2, 3, 4, 5]
    assert [line["met"] for line in sessions] == [[False, False]] * 2 + [[True]] * 3
    assert len({line["said"][0] for line in sessions}) == 5

    policies = gateway.ledger.policies
    made = [name for name in policies if name.startswith("evaluate-")]
    assert len(made) == 2
    assert all(policies[name].retired for name in made)
    main = [record for record in gateway.turns.records if record.kind is TurnKind.MAIN]
    # 2 sessions of two replies and 3 of one, and the message that ends each.
    assert len(main) == 2 * 3 + 3 * 2
    assert sum(record.ends_session for record in main) == 5
    assert {record.policy for record in main} == {made[1]}


async def test_notes_in_the_prompt_are_a_baseline_that_learns_nothing(gateway: Gateway, tmp_path: Path) -> None:
    found = await run(gateway, Pupil(needs=99), plan(recipes={}, notes=True), tmp_path / "lines.jsonl")
    noted = row(found, "notes")
    assert noted.sessions is not None
    assert (noted.sessions.mean, noted.reached) == (4, 1)  # the first session has no note yet
    assert noted.facts is not None
    assert noted.facts.mean == 1.0
    assert {record.kind for record in gateway.turns.records} == {TurnKind.SIDE}
    systems = [
        body["messages"][0]["content"] for body in gateway.engine.requests if body["messages"][0]["role"] == "system"
    ]
    first = json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[9])
    assert (first["arm"], first["session"]) == ("notes", 1)
    assert systems[0] == as_notes(line.removeprefix("- ") for line in systems[0].splitlines()[1:])
    assert all(f"- {said}" in systems[0] for said in first["said"][1:])


async def test_with_lessons_sessions_go_on_until_the_taste_is_kept_without_any(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is asked again after a pause: before the fourth and fifth session, as the sixth has nothing to practise.
    in_prompt = iter([0, 2, 2, 2, 1, 1, 0, 0, 0])

    async def lessons_in_prompt(client: AdminClient, policy: str) -> int:
        assert policy.endswith("-2-0-teacher")
        return next(in_prompt)

    monkeypatch.setattr(AdminClient, "lessons_in_prompt", lessons_in_prompt)
    out = tmp_path / "lines.jsonl"
    found = await run(gateway, Pupil(needs=4), plan(lessons=True, limit=9), out)
    lessons, learning = row(found, "lessons"), row(found, "learning")
    assert lessons.sessions is not None
    assert lessons.lessons is not None
    # The model was taught by the arm before, so that each session begins as wanted.
    assert (lessons.sessions.mean, lessons.reached, lessons.lessons.mean, learning.lessons) == (3, 1, 0, None)
    assert lessons.tokens == (len(PROMPT_IDS),) * 3
    held = [json.loads(line) for line in out.read_text().splitlines()]
    of_arm = [line for line in held if line.get("arm") == "lessons" and line["kind"] == "session"]
    assert [line["lessons"] for line in of_arm] == [0, 2, 2, 1, 0, 0, 0]
    assert {len(line["prompt_tokens"]) for line in of_arm} == {1}
    assert next(in_prompt, None) is None


def test_the_arm_with_lessons_is_the_recipe_that_practises_and_retires_them() -> None:
    recipe = DEFAULT_RECIPE.model_dump(mode="json")
    recipe["train"]["distillation"]["hint_distance"] = 1.0
    changed = Recipe.model_validate(with_lessons(recipe))
    assert changed.lessons == Lessons(enabled=True, from_corrections=True, practice=True, retire=True)
    assert (changed.name, changed.train, changed.signal) == ("lessons", DEFAULT_RECIPE.train, DEFAULT_RECIPE.signal)


async def test_users_of_whom_the_base_model_meets_the_rule_are_shown_and_do_not_count(
    gateway: Gateway, tmp_path: Path
) -> None:
    asked = plan(users=[User.STUDENT, User.TEACHER], joint=True)
    found = await run(gateway, Pupil(needs=4), asked, tmp_path / "lines.jsonl")
    student, teacher, everyone = (row(found, "learning", user) for user in ("student", "teacher", None))
    assert (student.base_rate, student.luck, student.counted) == (1.0, sessions_by_luck(1.0), False)
    assert teacher.counted
    assert student.sessions is not None
    assert teacher.sessions is not None
    # One policy: the student's thanks are further messages, too, so the teacher's second correction is enough.
    assert (student.sessions.mean, teacher.sessions.mean) == (3, 5 - 1)
    assert everyone.sessions == teacher.sessions
    assert {record.policy.rpartition("-")[2] for record in gateway.turns.records if record.kind is TurnKind.MAIN} == {
        "all"
    }


@pytest.mark.parametrize("stop_after", [4, 9, 11, 13])
async def test_a_killed_run_goes_on_and_finds_the_same(gateway: Gateway, tmp_path: Path, stop_after: int) -> None:
    asked, killed = plan(notes=True), tmp_path / "killed.jsonl"
    whole = await run(gateway, Pupil(needs=4), asked, tmp_path / "whole.jsonl")
    model = Pupil(needs=4)
    await run(gateway, model, asked, killed, stop_after=stop_after)
    with killed.open("ab") as file:
        file.write(b'{"kind": "session", "ar')  # cut off while it was written
    assert await run(gateway, model, asked, killed) == whole
    once, again = (
        [json.loads(line) for line in path.read_text().splitlines()[1:]] for path in (tmp_path / "whole.jsonl", killed)
    )
    assert again == once


async def test_a_model_may_play_the_user(gateway: Gateway, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def chat(request: Request) -> Response:
        body = json.loads(await request.body())
        asked.append(body)
        content = "" if len(asked) == 1 else f"Be nicer, number {len(asked)}."
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    async with (
        serving(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as url,
        ModelClient("the user", url, "player", None, answer_tokens=77) as player,
    ):
        found = await run(gateway, Pupil(needs=4), plan(user_model="player"), tmp_path / "lines.jsonl", player)
    learned = row(found, "learning")
    assert learned.sessions is not None
    assert learned.sessions.mean == 5
    roles = [message["role"] for message in asked[-1]["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert "is as you want it" in asked[-1]["messages"][0]["content"]
    assert {body["max_tokens"] for body in asked} == {77}


async def test_a_user_model_that_says_nothing_stops_the_run(gateway: Gateway, tmp_path: Path) -> None:
    async def chat(request: Request) -> Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    async with (
        serving(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as url,
        ModelClient("the user", url, "player", None) as player,
    ):
        with pytest.raises(NoAnswer, match="the user says nothing: a model that thinks needs more --answer-tokens"):
            await run(gateway, Pupil(needs=4), plan(user_model="player"), tmp_path / "lines.jsonl", player)


async def test_paused_training_is_noted_and_not_waited_for(gateway: Gateway, tmp_path: Path) -> None:
    store = gateway.services.training_operations._store
    create = store.create_policy

    async def paused(
        name: str, like: str, recipe: Recipe | None, version: int = 0, brought: BroughtAdapter | None = None
    ) -> TrainingView:
        view = await create(name, like, recipe, version, brought)
        await store.pause(name, "three rejected versions")
        return view

    store.create_policy = paused  # type: ignore[method-assign]
    await run(gateway, Pupil(needs=4), plan(), tmp_path / "lines.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    notes = {line["note"] for line in lines if line.get("arm") == "learning" and line["kind"] == "session"}
    assert notes == {"training is paused: three rejected versions"}


# Bad input ------------------------------------------------------------------------------------------------------------


def _file(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_file_of_lines_of_other_options_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    LineFile(path, plan().settings()).add(
        SessionLine(arm="frozen", seed=0, user="teacher", session=1, met=[True], said=["a", "b"], replies=["c"])
    )
    assert len(LineFile(path, plan().settings()).sessions) == 1
    with pytest.raises(SetupError, match=r"was begun with another limit, joint|was begun with another joint, limit"):
        LineFile(path, plan(limit=7, joint=True).settings())
    first, second = path.read_text().splitlines()
    with pytest.raises(SetupError, match=r"line 3: .*remove this line and run again"):
        LineFile(_file(path, first, second, "{}"), plan().settings())
    with pytest.raises(SetupError, match="line 1: not the settings of an evaluation"):
        LineFile(_file(path, second), plan().settings())


def test_a_missing_key_a_silent_gateway_and_bad_homework_are_one_line(tmp_path: Path) -> None:
    out, here = tmp_path / "lines.jsonl", {"CLAWLOOP_DATA": str(tmp_path / "data"), "CLAWLOOP_ADMIN_KEY": ""}
    evaluate = ["evaluate", "--out", str(out), "--url", "http://127.0.0.1:9"]
    assert "has no admin key: give --key" in refusal(clawloop(*evaluate, **here))
    said = refusal(clawloop(*evaluate, "--key", "cl-x", **here))
    assert "no gateway answers at http://127.0.0.1:9" in said
    assert "start `clawloop up`, or give --url" in said
    empty = _file(tmp_path / "empty.jsonl")
    assert "has no homework: write" in refusal(clawloop(*evaluate, "--homework", str(empty), **here))
    torn = _file(tmp_path / "torn.jsonl", '{"question": "a", "answer": "1"}', '{"question"')
    assert "torn.jsonl, line 2: not JSON" in refusal(clawloop(*evaluate, "--homework", str(torn), **here))
    assert "go together" in refusal(clawloop(*evaluate, "--user-url", "http://127.0.0.1:9", **here))
    assert "there is no folder" in refusal(clawloop("evaluate", "--out", str(tmp_path / "no" / "x"), **here))
    assert not out.exists()  # nothing was begun


async def test_a_key_that_is_no_admins_is_refused_in_one_line(gateway: Gateway, tmp_path: Path) -> None:
    asked = ["evaluate", "--out", str(tmp_path / "lines.jsonl"), "--url", gateway.url, "--key", gateway.key]
    said = refusal(await asyncio.to_thread(clawloop, *asked))
    assert "give --key one with the scope admin" in said


async def test_the_command_prints_the_table_and_prints_it_again_without_a_gateway(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.engine.script = Pupil(needs=4).reply
    recipe = Path("deploy/recipes/binary.toml").absolute()
    asked = ["evaluate", "--out", str(tmp_path / "lines.jsonl"), "--user", "teacher", "--limit", "6", "--replies", "2"]
    asked += ["--seeds", "1", "--no-notes", "--recipe", str(recipe), "--url"]
    done = await asyncio.to_thread(clawloop, *asked, gateway.url, "--key", gateway.admin_key)
    assert done.returncode == 0, done.stderr
    table = [line.split("  ") for line in done.stdout.splitlines()]
    assert [line[0] for line in table[:3]] == ["arm", "frozen", "frozen"]
    assert any(line[0] == "binary" and "5.0" in line for line in table)
    assert "Student's t over seeds" in done.stdout
    again = await asyncio.to_thread(clawloop, *asked, "http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    as_json = await asyncio.to_thread(clawloop, *asked, "http://127.0.0.1:9", "--json")
    found = {(one["arm"], one["user"]): one for one in json.loads(as_json.stdout)}
    assert found["binary", "teacher"]["sessions"]["mean"] == 5
    chart = tmp_path / "chart.png"
    drawn = await asyncio.to_thread(clawloop, *asked, "http://127.0.0.1:9", "--chart", str(chart))
    assert (drawn.returncode, chart.read_bytes()[:4]) == (0, b"\x89PNG")
    nowhere = await asyncio.to_thread(clawloop, *asked, "http://127.0.0.1:9", "--chart", str(tmp_path / "no" / "c.png"))
    assert nowhere.returncode == 1
    assert "--chart" in nowhere.stderr


def test_a_chart_has_the_mean_tokens_of_each_session_of_the_runs_that_came_so_far() -> None:
    runs = [
        RunFigure("notes", "teacher", seed, len(tokens), True, tokens=tokens)
        for seed, tokens in enumerate(((60, 80), (70, 100, 120)))
    ]
    assert tokens_by_session(runs) == [65, 90, 120]
    assert tokens_by_session([]) == []
