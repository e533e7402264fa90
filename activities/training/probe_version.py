"""Asks a candidate, its parent and the base model the policy's probes, and stores what the gate's check by them found;
and asks a base model the general questions.

The chat notices little of it: few requests at a time, answers of bounded length. Like side turns they are never judged
or trained; they are in no session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar
from uuid import UUID

from pydantic import ValidationError
from temporalio import activity

from activities.judging.vote_collector import Judge
from activities.training.steps import REASON_LIMIT
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.training import AskedProbe, GateCheck, ProbeAnswer, ProbeContent, ProbePlan
from clawloop.core.errors import EngineRejected, EngineUnavailable, JudgeRefused, JudgeUnavailable
from clawloop.core.families.template import Thinking
from clawloop.core.gate.checks import AnswerScores, AskedProbes, ProbePair, ProbeScores, is_right
from clawloop.core.gate.gate import BY_PROBES, decide, found
from clawloop.core.gate.general import ANSWER_TOKENS, KNOWN_ANSWERS, general_questions, why_not_watched
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import TurnId
from clawloop.core.judging.prompts import comparison_prompt, parse_choice, preference

log = logging.getLogger(__name__)

# Characters of a probe's problem in a heartbeat; 200 probes stay below Temporal's limit.
PROBLEM_LIMIT = 300
# Temperature at which a judge compares two answers; low, so that it repeats itself.
_TEMPERATURE = 0.1
# Answers whose figures are kept, without text: all probes of several policies, a few hundred bytes each.
_KEPT_ANSWERS = 2000
# A probe that may think gets this multiple of `probe_tokens`.
_THINKING = 4

Progress = TypeVar("Progress", bound=Message)


class ProbeStore(Protocol):
    """Stores what probes are asked of candidates, and what they found. Every call raises StoreUnavailable if PostgreSQL
    does not answer in time."""

    async def plan(self, policy: str, n: int) -> ProbePlan | None:
        """Return the questions for a version, always the same; None if it is no candidate or was asked already."""

    async def record(self, policy: str, n: int, checks: Sequence[GateCheck]) -> None:
        """Store the checks of a candidate; the first of each name counts. Nothing once it is decided."""

    async def lacks_general(self, policy: str) -> bool:
        """Return whether the policy's base model was not asked the general questions yet; False if it is retired."""

    async def keep_general(self, policy: str, known: Sequence[ProbeContent]) -> None:
        """Make the general questions that the base model knows the policy's probes, if they are enough; once."""


AnswerProbe = Callable[[str, int, ProbeContent, int], Awaitable[ProbeAnswer]]
"""A version's answer to a probe, given policy, version, probe and the most tokens of the answer.

Raises:
    EngineUnavailable: no engine has the version, or it did not answer; retry.
    EngineRejected: the engine will never take this probe.
"""


class ProbeVersion(Message):
    """Ask the candidate that step `n` made, and its parent, the policy's probes."""

    policy: str
    n: int


class AskBase(Message):
    """Ask the policy's base model the general questions."""

    policy: str


class BaseAsked(Message):
    """
    Args:
        asked: 0 if the base model was asked before.
        known: number of the questions that it answered rightly.
    """

    policy: str
    asked: int = 0
    known: int = 0


class BaseProgress(Message):
    """The general questions asked so far, by their place: whether each answer was right."""

    known: dict[int, bool]


class VersionProbed(Message):
    """Results of the probes.

    Args:
        asked: 0 if there was nothing to ask.
        failed: the version will be rejected for it.
        reason: figures, no text of a probe or an answer.
    """

    policy: str
    n: int
    asked: int = 0
    failed: bool = False
    reason: str = ""


class ProbeResult(Message):
    """Result of one probe: its scores, or why it has none; both where it has scores but was not compared."""

    scores: ProbeScores | None = None
    problem: str = ""


class ProbeProgress(Message):
    """The probes asked so far, by their ids, and how long that took: what the next attempt goes on from."""

    asked: dict[UUID, ProbeResult]
    seconds: float = 0.0


class ProbeActivities:
    """Activities that ask probes; on the queue `judge`, whose workers reach engines and judge.

    Args:
        answer: as soon as the engine can, without sampling: a candidate waits for it.
        answer_later: after the chats, sampled at `KNOWN_TEMPERATURE`.
        thinking: a policy's thinking mode; raises JudgeUnavailable if no engine says.
        at_once: probes that are asked at the same time, beside chats.
    """

    def __init__(
        self,
        store: ProbeStore,
        answer: AnswerProbe,
        answer_later: AnswerProbe,
        thinking: Callable[[str], Awaitable[Thinking]],
        judge: Judge,
        at_once: int = 2,
    ) -> None:
        self._store = store
        self._answer_probe = answer
        self._answer_later = answer_later
        self._thinking = thinking
        self._judge = judge
        self._slots = asyncio.Semaphore(at_once)  # of all policies whose versions are probed here
        self._later_slots = asyncio.Semaphore(at_once)
        self._answered: dict[tuple[str, int, UUID, int], tuple[AnswerScores, bool | None]] = {}

    @activity.defn
    async def ask_general_questions(self, request: AskBase) -> BaseAsked:
        """Ask the base model the general questions; those of which each of its answers is right are probes of the
        policy from then on. Nothing if it was asked before.

        Raises:
            EngineUnavailable: no engine answers; retry.
            StoreUnavailable
        """
        questions = general_questions()
        known = dict(_before(BaseProgress, BaseProgress(known={})).known)

        def progress() -> BaseProgress:
            return BaseProgress(known=known)

        async def ask(place: int) -> None:
            async with self._later_slots:
                content, is_known = questions[place].content, True
                for _ in range(KNOWN_ANSWERS):
                    try:
                        answer = await self._answer_later(request.policy, 0, content, ANSWER_TOKENS)
                    except EngineRejected:
                        is_known = False  # what cannot be asked cannot be watched
                    else:
                        is_known = bool(is_right(content, answer.text))
                    if not is_known:
                        break
                known[place] = is_known

        async with heartbeating(progress):
            if not await self._store.lacks_general(request.policy):
                return BaseAsked(policy=request.policy)
            await _all([ask(place) for place in range(len(questions)) if place not in known], progress)
            watched = [question.content for place, question in enumerate(questions) if known[place]]
            await self._store.keep_general(request.policy, watched)
        facts = {"policy": request.policy, "known": len(watched), "asked": len(questions)}
        log.info("base model asked the general questions", extra=facts)
        return BaseAsked(policy=request.policy, asked=len(questions), known=len(watched))

    @activity.defn
    async def probe_version(self, request: ProbeVersion) -> VersionProbed:
        """Ask a candidate and its parent; nothing if the step is no candidate or was probed.

        Raises:
            EngineUnavailable: no engine has one of the versions, or the one that has did not answer; retry.
            StoreUnavailable
        """
        before = _before(ProbeProgress, ProbeProgress(asked={}))
        asked, began = dict(before.asked), time.monotonic()

        def progress() -> ProbeProgress:
            return ProbeProgress(asked=asked, seconds=before.seconds + time.monotonic() - began)

        async with heartbeating(progress):
            plan = await self._store.plan(request.policy, request.n)
            if plan is None:
                return VersionProbed(policy=request.policy, n=request.n)

            async def ask(probe: AskedProbe) -> None:
                async with self._slots:
                    asked[probe.id] = await self._ask(plan, probe)

            await _all([ask(probe) for probe in await self._as_asked(plan) if probe.id not in asked], progress)
            results = [asked[probe.id] for probe in plan.probes]
            scores = [result.scores for result in results if result.scores is not None]
            problems = [result.problem for result in results if result.problem]
            note = why_not_watched(plan.general_known) if plan.recipe.gate.general_probes else ""
            asked_probes = AskedProbes(scores, problems, progress().seconds, note, plan.judged)
            checks = found(BY_PROBES, asked_probes, plan.recipe.gate)
            await self._store.record(request.policy, request.n, checks)
        for check in checks:
            facts = {"policy": request.policy, "version": request.n, "result": check.result, "why": check.reason}
            log.info("version probed", extra=facts | {"check": check.name})
        return VersionProbed(
            policy=request.policy,
            n=request.n,
            asked=len(scores),
            failed=decide(checks) is not None,
            reason="; ".join(check.reason for check in checks)[:REASON_LIMIT],
        )

    async def _as_asked(self, plan: ProbePlan) -> list[AskedProbe]:
        """The probes, none of them thought about if the model cannot think: it would ramble to the end of that limit,
        for which a CPU engine takes longer than an answer is waited for.

        Raises:
            JudgeUnavailable: no engine says whether it can.
        """
        thought_about = any(probe.content.thinks for probe in plan.probes)
        if not thought_about or await self._thinking(plan.policy) is not Thinking.NEVER:
            return list(plan.probes)
        return [replace(probe, content=replace(probe.content, thinks=False)) for probe in plan.probes]

    async def _ask(self, plan: ProbePlan, probe: AskedProbe) -> ProbeResult:
        try:
            if probe.content.is_checked:
                return ProbeResult(scores=await self._checked(plan, probe))
            parent, version = [await self._answer(plan, n, probe) for n in (plan.parent, plan.candidate.n)]
        except EngineRejected as error:
            return ProbeResult(problem=f"the engine refused ({error.status})")
        preferred, problem = None, ""
        try:
            preferred = await self._preference(plan, probe, parent, version)
        except (JudgeUnavailable, JudgeRefused) as error:
            problem = f"not compared: {error}"[:PROBLEM_LIMIT]
        pair = ProbePair(probe.content, parent, version, preferred=preferred)
        return ProbeResult(scores=ProbeScores.of(pair), problem=problem)

    async def _checked(self, plan: ProbePlan, probe: AskedProbe) -> ProbeScores:
        """The scores of a probe with checked content, beside parent and base model.

        Raises:
            EngineUnavailable, EngineRejected
        """
        parent, right_parent = await self._known(plan, plan.parent, probe)
        base, right_base = await self._known(plan, 0, probe) if plan.parent else (None, None)
        version, right = await self._known(plan, plan.candidate.n, probe)
        tools = bool(probe.content.tools)
        return ProbeScores(parent, version, tools, right_parent, right, None, right_base, base, probe.general)

    async def _known(self, plan: ProbePlan, n: int, probe: AskedProbe) -> tuple[AnswerScores, bool | None]:
        """Return the checked part of a version's answer to a probe, and whether it is right.

        Asked once of each version: a parent was a candidate before, and the base model is that of all.
        """
        key = (plan.policy, n, probe.id, _most_tokens(plan, probe))
        if key not in self._answered:
            answer = await self._answer(plan, n, probe)
            self._answered[key] = AnswerScores.of(answer), is_right(probe.content, answer.text)
            while len(self._answered) > _KEPT_ANSWERS:
                self._answered.pop(next(iter(self._answered)))
        return self._answered[key]

    async def _answer(self, plan: ProbePlan, n: int, probe: AskedProbe) -> ProbeAnswer:
        return await self._answer_probe(plan.policy, n, probe.content, _most_tokens(plan, probe))

    async def _preference(
        self, plan: ProbePlan, probe: AskedProbe, parent: ProbeAnswer, version: ProbeAnswer
    ) -> int | None:
        """Return the judge's preferences in both orders; equal answers are not shown to it. None: the recipe asks none,
        or its trial found that it cannot tell.

        Raises:
            JudgeUnavailable, JudgeRefused
        """
        signal = plan.recipe.signal
        if not signal.asks_judge:
            return None
        ours, theirs = (_shown(answer) for answer in (version, parent))
        if ours == theirs:
            return 0
        if await self._judge.votes_off(plan.policy, signal.judge_form) is not None:
            return None
        form = await self._judge.form(plan.policy, signal.judge_form)
        choices = []
        for first, second in ((ours, theirs), (theirs, ours)):
            prompt = comparison_prompt(TurnId(probe.id), probe.content.messages, first, second, form)
            answers = await self._judge.answers(plan.policy, prompt, 1, _TEMPERATURE)
            choices.append(parse_choice(answers[0].text, prompt) if answers and not answers[0].cut else None)
        return preference(*choices)


def _most_tokens(plan: ProbePlan, probe: AskedProbe) -> int:
    if probe.general and not probe.content.thinks:
        # The base model answered within half of that: what a version says beyond is no answer to the question.
        return min(plan.recipe.gate.probe_tokens, 2 * ANSWER_TOKENS)
    return plan.recipe.gate.probe_tokens * (_THINKING if probe.content.thinks else 1)


async def _all(asking: Sequence[Coroutine[None, None, None]], progress: Callable[[], object]) -> None:
    """Ask all probes; if one fails, heartbeat the progress, so that the next attempt asks none again.

    Raises:
        EngineUnavailable
    """
    tasks = [asyncio.create_task(one) for one in asking]
    try:
        await asyncio.gather(*tasks)
    except EngineUnavailable:
        if activity.in_activity():
            activity.heartbeat(progress())
        raise
    finally:
        for task in tasks:
            task.cancel()


def _before(kind: type[Progress], nothing: Progress) -> Progress:
    """The progress of earlier attempts; `nothing` where they ran another version of this code."""
    details = activity.info().heartbeat_details if activity.in_activity() else ()
    try:
        return kind.model_validate(details[0]) if details else nothing
    except ValidationError:
        return nothing


def _shown(answer: ProbeAnswer) -> str:
    return "\n".join([answer.text, *(f"{name} {arguments}" for name, arguments in answer.tool_calls)]).strip()
