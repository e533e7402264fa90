"""One evaluation: users hold sessions with policies made for it; the first reply of each session is checked by rule.

Each seed has frozen weights (first replies alone, which give the base rate), notes (frozen weights, and what users
corrected as lines of the system prompt), and each recipe from version 0, the first of them once more with lessons if
wanted. What does not learn chats in side turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from openai.types.chat import ChatCompletionMessageParam
from pydantic import JsonValue

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.sessions import as_notes, results_of
from clawloop.app.evaluation.clients import ModelClient, NoAnswer
from clawloop.app.evaluation.figures import IN_A_ROW, Row, RunFigure, sessions_until, table
from clawloop.app.evaluation.homework import Task
from clawloop.app.evaluation.lines import FactsLine, KnownLine, LineFile, SessionLine
from clawloop.app.evaluation.users import User
from clawloop.core.contracts.training import TrainingState
from clawloop.core.errors import SetupError
from clawloop.core.gate.checks import is_right
from clawloop.core.gate.general import (
    ANSWER_TOKENS,
    KNOWN_ANSWERS,
    KNOWN_TEMPERATURE,
    MIN_KNOWN,
    general_questions,
    why_not_watched,
)
from clawloop.core.recipes.lessons import Lessons

FROZEN = "frozen"
_FROZEN_FACTS = (FROZEN, 0, None)
NOTES = "notes"
LESSONS = "lessons"
NOTE_CHARACTERS = 6000
"""Notes are no longer than this in all, about 1,500 tokens; the newest stay."""
_CONCURRENT = 4
_POLL_SECONDS = 1.0
# The reply to a session's last message is not looked at.
_CLOSING_TOKENS = 8
# A model that plays the user may say nothing once.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Args:
        like: the policy whose base model is evaluated.
        recipes: by name; None: the recipe of `like`.
        lessons: whether a further arm has the first recipe with lessons of what users correct, practised and retired.
        joint: one policy serves all users; otherwise each has one.
        limit: sessions of a user at most.
        replies: replies of a session at most.
    """

    like: str
    recipes: Mapping[str, dict[str, Any] | None]
    notes: bool
    users: Sequence[User]
    homework: Sequence[Task]
    joint: bool
    seeds: int
    limit: int
    replies: int
    answer_tokens: int
    user_model: str | None
    lessons: bool = False

    @property
    def arms(self) -> list[str]:
        return [FROZEN, *([NOTES] if self.notes else []), *self.recipes, *([LESSONS] if self.lessons else [])]

    @property
    def groups(self) -> list[tuple[User, ...]]:
        """The users of each policy."""
        return [tuple(self.users)] if self.joint else [(user,) for user in self.users]

    def settings(self) -> dict[str, JsonValue]:
        """Settings that a rerun must share, by option."""
        homework = "\n".join(f"{task.question}\t{task.answer}" for task in self.homework)
        return {
            "policy": self.like,
            "recipe": dict(self.recipes),
            "notes": self.notes,
            "lessons": self.lessons,
            "user": [user.value for user in self.users],
            "homework": hashlib.sha256(homework.encode()).hexdigest()[:16],
            "joint": self.joint,
            "seeds": self.seeds,
            "limit": self.limit,
            "replies": self.replies,
            "answer-tokens": self.answer_tokens,
            "user-model": self.user_model,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """The users of one policy in one arm with one seed."""

    arm: str
    seed: int
    users: tuple[User, ...]

    @property
    def user(self) -> str | None:
        """The cell's user; None if it has several."""
        return self.users[0].value if len(self.users) == 1 else None


def cells(plan: Plan) -> list[Cell]:
    """All cells with corrections, in the order in which they are run."""
    arms = [arm for arm in plan.arms if arm != FROZEN]
    return [Cell(arm, seed, group) for seed in range(plan.seeds) for arm in arms for group in plan.groups]


def next_session(plan: Plan, lines: LineFile, cell: Cell) -> tuple[User, int] | None:
    """The user whose turn it is and the session's number; None once each had three in a row or the limit is reached.

    Users of one policy take turns until the last of them is done: all of them keep using it. With lessons the last
    three in a row are without any in the prompt.
    """
    met = {user: _met(lines, cell.arm, cell.seed, user) for user in cell.users}
    if all(sessions_until(found) for found in met.values()) and (cell.arm != LESSONS or _by_heart(lines, cell)):
        return None
    user = min(cell.users, key=lambda one: len(met[one]))
    return (user, len(met[user]) + 1) if len(met[user]) < plan.limit else None


def _by_heart(lines: LineFile, cell: Cell) -> bool:
    """True if each user's last sessions began as wanted without a lesson in the prompt."""
    of_users = [lines.sessions.get((cell.arm, cell.seed, user.value), [])[-IN_A_ROW:] for user in cell.users]
    return all(len(last) == IN_A_ROW and all(one.met[0] and not one.lessons for one in last) for last in of_users)


def is_finished(plan: Plan, lines: LineFile, cell: Cell) -> bool:
    """True once its sessions were held and the facts asked, if enough are known."""
    asked = lines.known is not None and (
        len(lines.known) < MIN_KNOWN or (cell.arm, cell.seed, cell.user) in lines.facts
    )
    return asked and next_session(plan, lines, cell) is None


def is_complete(plan: Plan, lines: LineFile) -> bool:
    """True if the file has all that the plan asks for."""
    asked = all(len(_met(lines, FROZEN, seed, user)) == plan.limit for seed in range(plan.seeds) for user in plan.users)
    return asked and all(is_finished(plan, lines, cell) for cell in cells(plan)) and lines.known is not None


def rows(plan: Plan, lines: LineFile) -> list[Row]:
    """The table of the runs that are finished."""
    base_rates = {}
    for user in plan.users:
        firsts = [_met(lines, FROZEN, seed, user) for seed in range(plan.seeds)]
        if all(len(met) == plan.limit for met in firsts):
            base_rates[user.value] = fmean(one for met in firsts for one in met)
    return table(finished_runs(plan, lines), plan.arms, [user.value for user in plan.users], base_rates)


def finished_runs(plan: Plan, lines: LineFile) -> list[RunFigure]:
    """The runs that are finished, those of frozen weights first."""
    runs = []
    for user in plan.users:
        for seed in range(plan.seeds):
            if len(_met(lines, FROZEN, seed, user)) == plan.limit:
                share = _share(lines.facts.get((FROZEN, seed, None)))  # asked once, see `_FROZEN_FACTS`
                runs.append(_figure(plan, lines, FROZEN, seed, user, share))
    for cell in cells(plan):
        if is_finished(plan, lines, cell):
            share = _share(lines.facts.get((cell.arm, cell.seed, cell.user)))
            runs += [_figure(plan, lines, cell.arm, cell.seed, user, share) for user in cell.users]
    return runs


def _share(facts: FactsLine | None) -> float | None:
    return None if facts is None else facts.right / facts.asked


def notes_of(lines: LineFile, cell: Cell) -> str:
    """The system prompt that a memory of the users' corrections makes, newest last; empty if there are none."""
    held = [line for user in cell.users for line in lines.sessions.get((cell.arm, cell.seed, user.value), [])]
    in_order = sorted(held, key=lambda line: line.session)
    newest_first = list(dict.fromkeys(said for line in reversed(in_order) for said in reversed(line.corrections)))
    kept: list[str] = []
    for said in newest_first:
        if sum(map(len, kept)) + len(said) > NOTE_CHARACTERS:
            break
        kept.append(said)
    return as_notes(kept[::-1]) if kept else ""


def _met(lines: LineFile, arm: str, seed: int, user: User) -> list[bool]:
    return [line.met[0] for line in lines.sessions.get((arm, seed, user.value), [])]


def _figure(plan: Plan, lines: LineFile, arm: str, seed: int, user: User, facts: float | None = None) -> RunFigure:
    found = sessions_until(_met(lines, arm, seed, user))
    held = sorted(lines.sessions.get((arm, seed, user.value), []), key=attrgetter("session"))
    return RunFigure(
        arm,
        user.value,
        seed,
        plan.limit if found is None else found,
        found is not None,
        facts,
        held[-1].lessons if held else None,
        [line.prompt_tokens[0] for line in held if line.prompt_tokens],
    )


def with_lessons(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with lessons of what users correct, which are practised and leave the prompt once they are learned."""
    train = recipe["train"]
    # A lesson moves a whole reply, and would teach nothing beyond a bound on that.
    distillation = train["distillation"] | {"hint_distance": None}
    lessons = Lessons(enabled=True, from_corrections=True, practice=True, retire=True)
    changed = {"train": train | {"distillation": distillation}, "lessons": lessons.model_dump(mode="json")}
    return {**recipe, **changed, "name": LESSONS}


class Evaluation:
    """
    Args:
        url: the gateway's.
        user_model: plays the users; None: they are scripted.
        wait_minutes: longest wait until a session is learned.
        practice_minutes: pause before each further session with lessons in the prompt, once the user had three in a
            row: engines practise while no user chats.
        report: gets a line of progress.
    """

    def __init__(
        self,
        plan: Plan,
        lines: LineFile,
        url: str,
        admin: AdminClient,
        user_model: ModelClient | None,
        wait_minutes: float,
        report: Callable[[str], None],
        practice_minutes: float = 0.0,
    ) -> None:
        self._plan = plan
        self._lines = lines
        self._url = url
        self._admin = admin
        self._user_model = user_model
        self._wait_minutes = wait_minutes
        self._report = report
        self._practice_minutes = practice_minutes

    async def run(self) -> None:
        """Hold all sessions that the file does not have yet.

        Raises:
            SetupError: a model does not answer, or a session is not learned in time; what was found is in the file.
        """
        there = await self._admin.policies()
        async with self._policy("base", None, there) as base:
            await self._ask_known(base)
            await self._ask_frozen(base)
            for cell in cells(self._plan):
                if cell.arm == NOTES:
                    await self._hold(base, cell, None)
                    continue
                name = f"{self._plan.arms.index(cell.arm)}-{cell.seed}-{cell.user or 'all'}"
                if is_finished(self._plan, self._lines, cell):
                    if self._policy_name(name) in there:  # a kill came before it was retired
                        await self._admin.retire_policy(self._policy_name(name))
                    continue
                async with self._policy(name, await self._recipe_of(cell.arm), there) as client:
                    await self._hold(client, cell, self._policy_name(name))

    async def _recipe_of(self, arm: str) -> dict[str, Any] | None:
        if arm != LESSONS:
            return self._plan.recipes[arm]
        first = next(iter(self._plan.recipes.values()), None)
        return with_lessons(await self._admin.recipe(self._plan.like) if first is None else first)

    def _policy_name(self, name: str) -> str:
        return f"evaluate-{self._lines.run}-{name}"

    @asynccontextmanager
    async def _policy(self, name: str, recipe: dict[str, Any] | None, there: set[str]) -> AsyncIterator[ModelClient]:
        """A client of a policy of this evaluation, made unless it is there; retired unless the run ends early."""
        policy = self._policy_name(name)
        if policy not in there:
            await self._admin.create_policy(policy, self._plan.like, recipe)
        key = await self._admin.create_key(policy)
        async with ModelClient(
            "the policy", self._url, "policy", key, answer_tokens=self._plan.answer_tokens
        ) as client:
            yield client
            if client.cut:
                most = self._plan.answer_tokens
                self._report(f"{client.cut} replies were cut at {most:,} tokens: raise --answer-tokens")
        # An engine holds the adapters of only a few policies.
        await self._admin.retire_policy(policy)

    async def _ask_known(self, base: ModelClient) -> None:
        if self._lines.known is None:
            right: Sequence[int] = range(len(general_questions()))
            for _ in range(KNOWN_ANSWERS):
                right = await self._ask_facts(base, right, "", temperature=KNOWN_TEMPERATURE)
            self._lines.add(KnownLine(questions=list(right)))
        known = len(self._lines.known or ())
        if missing := why_not_watched(known):
            self._report(f"no facts are asked: {missing}")
        else:
            self._report(f"the base model knows {known} of {len(general_questions())} facts")
            if _FROZEN_FACTS not in self._lines.facts:  # as every arm is asked: these answers were sampled
                await self._keep_facts(base, _FROZEN_FACTS, "")

    async def _ask_facts(
        self, client: ModelClient, questions: Sequence[int], system: str, temperature: float = 0.0
    ) -> list[int]:
        """The questions that are answered rightly, asked in side turns."""
        content = [general_questions()[number].content for number in questions]

        async def one(number: int) -> str:
            messages: list[ChatCompletionMessageParam] = [
                *_system(system), {"role": "user", "content": str(content[number].messages[-1]["content"])}
            ]  # fmt: skip
            headers = {"X-Turn-Type": "side"}
            return await client.ask(messages, headers=headers, temperature=temperature, most_tokens=ANSWER_TOKENS)

        answers = await results_of(one, range(len(content)), _CONCURRENT)
        return [question for question, of, text in zip(questions, content, answers, strict=True) if is_right(of, text)]

    async def _ask_frozen(self, base: ModelClient) -> None:
        """First replies of frozen weights; which reply is given depends on no other."""
        plan = self._plan
        for seed in range(plan.seeds):
            for user in plan.users:
                for at in range(len(_met(self._lines, FROZEN, seed, user)), plan.limit, _CONCURRENT):
                    numbers = range(at + 1, min(at + _CONCURRENT, plan.limit) + 1)
                    ask = partial(self._session, base, FROZEN, seed, user, replies=1)
                    for line in await results_of(ask, numbers, _CONCURRENT):
                        self._lines.add(line)
                met = _met(self._lines, FROZEN, seed, user)
                self._report(f"{FROZEN}, seed {seed}, {user}: {sum(met)} of {len(met)} first replies meet the rule")

    async def _hold(self, client: ModelClient, cell: Cell, policy: str | None) -> None:
        """The sessions of a cell that are missing, and the facts after them.

        Args:
            policy: learns from the sessions; None: notes are taken.
        """
        while (following := next_session(self._plan, self._lines, cell)) is not None:
            user, number = following
            version, note = (None, "") if policy is None else await self._learned(policy)
            system = "" if policy is not None else notes_of(self._lines, cell)
            lessons = None
            if cell.arm == LESSONS and policy is not None:
                lessons = await self._admin.lessons_in_prompt(policy)
                # Without a lesson in the prompt nothing is practised.
                if lessons and sessions_until(_met(self._lines, cell.arm, cell.seed, user)) is not None:
                    await asyncio.sleep(60 * self._practice_minutes)
                    version, note = await self._learned(policy)  # practice may have filled a batch
                    lessons = await self._admin.lessons_in_prompt(policy)
            line = await self._session(
                client, cell.arm, cell.seed, user, number,
                replies=self._plan.replies, learns=policy is not None, system=system, version=version, note=note,
            )  # fmt: skip
            self._lines.add(line.model_copy(update={"lessons": lessons}))
            told = "meets the rule" if line.met[0] else "misses the rule"
            by = "" if version is None else f" by version {version}"
            held = "" if lessons is None else f" with {lessons} lessons"
            self._report(
                f"{cell.arm}, seed {cell.seed}, {user}, session {number}: "
                f"first reply{by}{held} {told}{note and '; ' + note}"
            )
        known = self._lines.known or ()
        if len(known) >= MIN_KNOWN and not is_finished(self._plan, self._lines, cell):
            if policy is not None:
                await self._learned(policy)
            system = "" if policy is not None else notes_of(self._lines, cell)
            await self._keep_facts(client, (cell.arm, cell.seed, cell.user), system)

    async def _keep_facts(self, client: ModelClient, of: tuple[str, int, str | None], system: str) -> None:
        arm, seed, user = of
        known = self._lines.known or ()
        right = await self._ask_facts(client, known, system)
        self._lines.add(FactsLine(arm=arm, seed=seed, user=user, asked=len(known), right=len(right)))

    async def _session(
        self, client: ModelClient, arm: str, seed: int, user: User, number: int, *,
        replies: int, learns: bool = False, system: str = "", version: int | None = None, note: str = "",
    ) -> SessionLine:  # fmt: skip
        """One session; its draws depend on seed, user and number alone, so that arms and reruns ask the same."""
        rng = random.Random(f"{seed} {user} {number}")
        said = [user.opening(self._task(seed, user, number), rng)]
        messages: list[ChatCompletionMessageParam] = [*_system(system), {"role": "user", "content": said[0]}]
        # A session that a kill cut short is held again under its name, so that its end closes both.
        headers = {
            "X-Session-Id": f"{self._policy_name(arm)}-{seed}-{user}-{number}",
            "X-Turn-Type": "main" if learns else "side",
        }
        met: list[bool] = []
        given: list[str] = []
        tokens: list[int] = []
        for _ in range(replies):
            answer = await client.answer(messages, headers=headers)
            given.append(answer.text)
            tokens += [] if answer.prompt_tokens is None else [answer.prompt_tokens]
            faults = user.faults(given[-1])
            met.append(not faults)
            messages.append({"role": "assistant", "content": given[-1]})
            said.append(await self._reaction(user, messages, faults, rng))
            messages.append({"role": "user", "content": said[-1]})
            if not faults:
                break
        if learns:  # the last reaction is sent as well, so that the reply before it is judged
            await client.ask(messages, headers=headers | {"X-Session-Done": "true"}, most_tokens=_CLOSING_TOKENS)
        return SessionLine(
            arm=arm, seed=seed, user=user.value, session=number, met=met, said=said, replies=given,
            version=version, note=note, prompt_tokens=tokens,
        )  # fmt: skip

    def _task(self, seed: int, user: User, number: int) -> Task:
        homework = list(self._plan.homework)
        random.Random(f"homework {seed} {user}").shuffle(homework)
        return homework[(number - 1) % len(homework)]

    async def _reaction(
        self, user: User, messages: Sequence[ChatCompletionMessageParam], faults: Sequence[str], rng: random.Random
    ) -> str:
        if self._user_model is None:
            return user.reaction(faults, rng)
        seen: list[ChatCompletionMessageParam] = [{"role": "system", "content": user.persona(content=not faults)}]
        # The model's own part is the assistant's; many templates want a user's message first.
        seen.append({"role": "user", "content": "Begin: write your first message to the assistant."})
        for message in messages:
            text = str(message.get("content") or "")
            if message["role"] == "user":
                seen.append({"role": "assistant", "content": text})
            elif message["role"] == "assistant":
                seen.append({"role": "user", "content": text})
        for _ in range(_ATTEMPTS):
            if said := await self._user_model.ask(seen):
                return said
        raise NoAnswer(f"{self._user_model.name} says nothing: a model that thinks needs more --answer-tokens")

    async def _learned(self, policy: str) -> tuple[int, str]:
        """The version that answers once every turn is judged and every full batch trained, and why nothing is learned.

        Training that is paused, e.g. after steps that the gate rejected, is not waited for.
        """
        status = None
        try:
            async with asyncio.timeout(60 * self._wait_minutes):
                while True:
                    status = await self._admin.training_status(policy)
                    if status.is_done:
                        return status.version, ""
                    if status.state is TrainingState.PAUSED and not status.judging:
                        return status.version, f"training is {status.reason}"
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            why = "" if status is None else f": {status.reason}"
            raise SetupError(
                f"{policy} has not learned all after {self._wait_minutes:g} minutes{why}; run again to go on"
            ) from error


def _system(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "system", "content": text}] if text else []
