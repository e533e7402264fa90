"""One evaluation: answers to held-out tasks are graded, a persona chats about others, and the same is graded again.

The first answer to a task is what is graded, as in the original, but to tasks that no session is about; graded answers
are side turns, so nothing is learned from them. What the original leaves out is here: both graders, whether the
solution is right, confidence intervals, and the change task by task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from uuid import uuid4

from openai.types.chat import ChatCompletionMessageParam
from pydantic import JsonValue

from clawloop.app.evaluation.clients import ModelClient, NoAnswer
from clawloop.app.evaluation.graders import grade_by_rules, grading_prompt, parse_grade
from clawloop.app.evaluation.settings import DONE, MOST_TURNS, Setting, SettingName
from clawloop.app.evaluation.statistics import Estimate, change, estimate
from clawloop.app.evaluation.tasks import Task, is_right
from clawloop.core.errors import SetupError

_CONCURRENT = 4


@dataclass(frozen=True, slots=True)
class Models:
    """
    Args:
        persona: plays the user; grader: grades styles. Any OpenAI-compatible model each.
    """

    policy: ModelClient
    persona: ModelClient
    grader: ModelClient

    def cut(self) -> dict[str, int]:
        """Number of answers that were cut, by who gave them."""
        return {"policy": self.policy.cut, "persona": self.persona.cut, "grader": self.grader.cut}

    def cut_lines(self) -> list[str]:
        """A warning for each client whose answers were cut."""
        return [
            f"{client.cut} answers of {client.name} were cut at {client.answer_tokens:,} tokens: raise --answer-tokens"
            for client in (self.policy, self.persona, self.grader)
            if client.cut
        ]


@dataclass(frozen=True, slots=True)
class Grades:
    """The grades of the held-out tasks, in their order; None where the grader gave none.

    Args:
        right: whether a student's solution is right; None in the teacher's setting.
    """

    by_model: list[float | None]
    by_rules: list[float | None]
    right: list[float | None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """
    Args:
        sessions: number of those that took place.
        held_out: number of graded tasks.
        completed: sessions that the persona ended, of all.
        turns: answers in all sessions.
        cut: answers that were longer than --answer-tokens, by who gave them.
        after, changes: empty if a model stopped answering before it was all graded again.
        problem: why there are fewer sessions than asked for, or no grades afterwards; None: there are.
    """

    setting: SettingName
    sessions: int
    held_out: int
    completed: int
    turns: int
    cut: dict[str, int]
    before: dict[str, Estimate]
    after: dict[str, Estimate]
    changes: dict[str, Estimate]
    problem: str | None

    def as_json(self) -> dict[str, JsonValue]:
        found: dict[str, JsonValue] = asdict(self)
        return found


def split(tasks: Sequence[Task], sessions: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """Tasks to chat about, and others to grade.

    Raises:
        SetupError: there are too few tasks.
    """
    if len(tasks) < held_out + 1:
        raise SetupError(f"{len(tasks)} tasks, but {held_out} are held out: give more tasks, or a smaller --held-out")
    chats = tasks[held_out:]
    return [chats[at % len(chats)] for at in range(sessions)], list(tasks[:held_out])


async def evaluate(
    setting: Setting,
    models: Models,
    chats: Sequence[Task],
    held_out: Sequence[Task],
    learned: Callable[[], Awaitable[None]],
    report: Callable[[str], None],
) -> Evaluation:
    """Grade, chat, wait until it is learned, and grade again.

    A model that stops answering after the first grades ends the sessions, not the evaluation: what it found by then
    took hours.

    Args:
        chats: the task of each session.
        learned: returns once the sessions so far are learned; raises SetupError if that cannot be found out.
        report: gets a line of progress.

    Raises:
        NoAnswer: a model did not answer before there were any grades.
    """
    before = await grade(setting, models, held_out)
    report(f"before: {_line(before)}")
    for line in models.cut_lines():
        report(line)
    sessions = completed = turns = 0
    after: Grades | None = None
    problem: str | None = None
    run = uuid4().hex[:8]
    try:
        for number, task in enumerate(chats, start=1):
            answers, done = await chat(setting, models, task, f"{setting.name}-{run}-{number}", random.Random(number))
            sessions, completed, turns = number, completed + done, turns + answers
            report(f"session {number} of {len(chats)}: {answers} answers, {'done' if done else 'not done'}")
    except NoAnswer as error:
        problem = f"{sessions} of {len(chats)} sessions: {error}"
        report(problem)
    try:
        await learned()
        after = await grade(setting, models, held_out)
        report(f"after: {_line(after)}")
    except SetupError as error:
        problem = "; ".join(filter(None, [problem, f"not graded again: {error}"]))
    return Evaluation(
        setting=setting.name,
        sessions=sessions,
        held_out=len(held_out),
        completed=completed,
        turns=turns,
        cut=models.cut(),
        before=_estimates(before),
        after={} if after is None else _estimates(after),
        changes={} if after is None else _changes(before, after),
        problem=problem,
    )


async def chat(setting: Setting, models: Models, task: Task, session: str, rng: random.Random) -> tuple[int, bool]:
    """One session; how many answers it had, and whether the persona ended it.

    Each message of the persona is a next state that the policy learns from; the last one, which only ends the session,
    is sent as well, so that the answer before it is judged.
    """
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": setting.opening(task, rng)}]
    for turn in range(1, MOST_TURNS + 1):
        is_last = turn == MOST_TURNS
        headers = {"X-Session-Id": session, "X-Turn-Type": "main"} | ({"X-Session-Done": "true"} if is_last else {})
        answer = await models.policy.ask(messages, headers=headers)
        messages.append({"role": "assistant", "content": answer})
        if is_last:
            break
        said = await models.persona.ask(_as_persona(setting, messages))
        is_done = said.strip(" .!*`").upper() == DONE
        if is_done or not said:
            closing: list[ChatCompletionMessageParam] = [*messages, {"role": "user", "content": "Thanks, that is all."}]
            # A persona that says nothing praises nothing: as a side turn its end is no feedback on the answer.
            kind = "main" if is_done else "side"
            ends = {"X-Session-Id": session, "X-Turn-Type": kind, "X-Session-Done": "true"}
            await models.policy.ask(closing, headers=ends)
            return turn, is_done
        messages.append({"role": "user", "content": said})
    return MOST_TURNS, False


async def grade(setting: Setting, models: Models, tasks: Sequence[Task]) -> Grades:
    """Grades of the first answer to each task, asked as a side turn."""
    slots = asyncio.Semaphore(_CONCURRENT)

    async def one(number: int, task: Task) -> tuple[float | None, float, float | None]:
        async with slots:
            opening = setting.opening(task, random.Random(number))
            side = {"X-Turn-Type": "side", "X-Session-Id": f"graded-{uuid4().hex[:12]}"}
            text = await models.policy.ask([{"role": "user", "content": opening}], headers=side)
            question = grading_prompt(setting, opening, text)
            verdict = await models.grader.ask([{"role": "user", "content": question}], temperature=0.0)
            right = float(is_right(task, text)) if setting.name is SettingName.STUDENT else None
            return parse_grade(verdict), grade_by_rules(setting, text), right

    asked = [asyncio.create_task(one(number, task)) for number, task in enumerate(tasks)]
    try:
        rows = await asyncio.gather(*asked)
    finally:
        # Otherwise the other questions would go on with closed clients after one of them failed.
        for question in asked:
            question.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return Grades([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def _as_persona(setting: Setting, messages: Sequence[ChatCompletionMessageParam]) -> list[ChatCompletionMessageParam]:
    """The conversation as the persona sees it: its own messages are the assistant's."""
    seen: list[ChatCompletionMessageParam] = [{"role": "system", "content": setting.persona}]
    for message in messages:
        text = str(message.get("content") or "")
        if message["role"] == "user":
            seen.append({"role": "assistant", "content": text})
        else:
            seen.append({"role": "user", "content": text})
    # Many templates want a user's message first.
    seen.insert(1, {"role": "user", "content": "Begin: write your first message to the assistant."})
    return seen


def _lists(grades: Grades) -> dict[str, list[float | None]]:
    return {"by_model": grades.by_model, "by_rules": grades.by_rules, "right": grades.right}


def _estimates(grades: Grades) -> dict[str, Estimate]:
    return {name: estimate(values, name) for name, values in _lists(grades).items()}


def _changes(before: Grades, after: Grades) -> dict[str, Estimate]:
    return {name: change(values, _lists(after)[name]) for name, values in _lists(before).items()}


def _line(grades: Grades) -> str:
    return ", ".join(f"{name} {shown(found)}" for name, found in _estimates(grades).items() if found.count)


def shown(found: Estimate) -> str:
    """E.g. `0.42 (0.30 to 0.55, 12 tasks)`."""
    if found.mean is None or found.low is None or found.high is None:
        return "not graded"
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}, {found.count} tasks)"
