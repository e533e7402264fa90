"""Practises lessons: has the engines answer the newest requests again while they have nothing else to do.

While a lesson is new, some are answered with it first: what it does is measured by these replies in each step.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from temporalio import activity

from activities.judging.evaluation import Render
from activities.notify import TrainingNotifier
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import EngineAnswerUnusable, EngineRejected, EngineUnavailable, PromptTooLong
from clawloop.core.heartbeat import heartbeating
from clawloop.core.judging.hints import PromptChange
from clawloop.core.lessons.practice import (
    Practice,
    PracticeResult,
    PractisedReply,
    control_of,
    places_of,
    taught_by,
    without_lesson,
)
from clawloop.core.samples.decision import PREFIX, sampling_problems, unseen_parts, why_not_trainable

log = logging.getLogger(__name__)

# In one activity: its worker's place is free for judging again after these.
AT_MOST = 16


class PracticeStore(Protocol):
    """Stores what is practised. Every call raises StoreUnavailable if PostgreSQL does not answer in time."""

    async def next(self, policy: str) -> Practice | None:
        """The newest request that is to measure a new lesson, or that was not practised with the other active ones.

        None if there is nothing to practise now: the recipe does not say so, no lesson is active, training is paused or
        its schedule closed, or as many practice samples wait for a step as a batch has.
        """

    async def keep(self, practice: Practice, result: PracticeResult) -> str | None:
        """Store what became of a request, its turn and its sample in one transaction; once for each set of lessons.

        Nothing if lessons or recipe have changed since, the request was erased, or it was practised or a lesson is
        measured by it meanwhile.

        Returns:
            The policy's id if its batch became ready with this call, else None.
        """


AnswerAgain = Callable[[Practice], Awaitable[PractisedReply | None]]
"""The reply to a request, without lessons or with them; None while no engine that has the version is idle.

Raises:
    EngineUnavailable: the engine did not answer; retry later.
    EngineRejected: it will never take this request.
    EngineAnswerUnusable: what it answered is no chat completion.
"""


class Practise(Message):
    """Practise the policy's lessons while its engines are idle."""

    policy: str


class Practised(Message):
    """
    Args:
        requests: those that were answered again, or cannot be.
        more: there may be more to practise soon.
    """

    policy: str
    requests: int
    more: bool


class PracticeActivities:
    """Activities that practise lessons; on the queue `judge`, whose workers reach engines."""

    def __init__(self, store: PracticeStore, answer: AnswerAgain, render: Render, training: TrainingNotifier) -> None:
        self._store = store
        self._answer = answer
        self._render = render
        self._training = training

    @activity.defn
    async def practise(self, request: Practise) -> Practised:
        """Practise the policy's newest requests, one after the other, until an engine is needed for something else.

        Raises:
            EngineUnavailable, StoreUnavailable: retry. The last attempt practises the requests behind the one that no
                engine answers.
        """
        policy, requests = request.policy, 0
        async with heartbeating():
            while requests < AT_MOST:
                practice = await self._store.next(policy)
                if practice is None:
                    return Practised(policy=policy, requests=requests, more=False)
                result = await self._practise(practice)
                if result is None:
                    break
                crash_point(CrashPoint.PRACTICE_ANSWERED)
                ready_policy = await self._store.keep(practice, result)
                crash_point(CrashPoint.PRACTICE_STORED)
                await self._training.notify(ready_policy)
                log.info("practised", extra={"turn_id": str(practice.source.turn_id), "why": result.why})
                requests += 1
        return Practised(policy=policy, requests=requests, more=True)

    async def _practise(self, practice: Practice) -> PracticeResult | None:
        """What the request teaches; None while no engine is idle."""
        if (fault := _request_fault(practice.source)) is not None:
            return _nothing(fault)
        try:
            reply = await self._answer(practice)
            if reply is None:
                return None
            if (fault := _fault(reply.record)) is not None:
                return _nothing(fault)
            # As for hints: only a template that gives the recorded ids can be trusted with lessons.
            if await self._render(reply.record, reply.record.messages) != reply.record.prompt_ids:
                return _nothing("template mismatch")
            if practice.measured is not None:
                plain = await self._change(reply, without_lesson(reply.record, practice.measured))
                return PracticeResult(reply.record, {0: plain}, "measures a lesson")
            taught = await self._change(reply, taught_by(reply, practice.lessons))
            with_control = practice.recipe.train.advantage.control
            control = await self._change(reply, control_of(reply, practice.lessons)) if with_control else None
        except EngineUnavailable as error:
            if not _is_last_attempt():
                raise
            # An engine that is away is not asked: this request takes it too long or breaks it, and others wait behind.
            return _nothing(f"{error}, and nothing better at earlier attempts")
        except EngineRejected as error:
            return _nothing(f"the engine refused the request ({error.status})")
        except EngineAnswerUnusable as error:
            return _nothing(f"the engine's answer is unusable: {error}")
        except PromptTooLong as error:
            return _nothing(f"the prompt with the lessons is too long: {error}")
        return PracticeResult(reply.record, places_of(taught, control), _why(practice.lessons))

    async def _change(self, reply: PractisedReply, turn: TurnRecord) -> PromptChange:
        return PromptChange.between(reply.record.prompt_ids or (), await self._render(turn, turn.messages))


def _request_fault(source: TurnRecord) -> str | None:
    """The reason that no reply to the turn's request can be trained; None if one can.

    The turn's own reply is none, nor are its tokens, which a lesson may have taken along that was forgotten.
    """
    reasons = sampling_problems(source.sampling, source.tools)
    reasons += [f"{kind} in the prompt" for kind in unseen_parts(source.messages)]
    return PREFIX + ", ".join(reasons) if reasons else None


def _fault(turn: TurnRecord) -> str | None:
    """The reason that this reply cannot be trained as it was sampled; None if it can.

    Lessons in its prompt are no reason: a reply that holds some measures them.
    """
    return why_not_trainable(
        status=turn.status,
        sampling=turn.sampling,
        tools=turn.tools,
        prompt_ids=turn.prompt_ids,
        response_ids=turn.response_ids,
        logprobs=turn.logprobs,
        unseen=unseen_parts(turn.messages),
        reply=turn.response,
    )


def _is_last_attempt() -> bool:
    """True if an error of this attempt would be the activity's."""
    if not activity.in_activity():
        return False
    info = activity.info()
    limit = 0 if info.retry_policy is None else info.retry_policy.maximum_attempts
    return 0 < limit <= info.attempt


def _nothing(why: str) -> PracticeResult:
    return PracticeResult(None, {}, why)


def _why(lessons: tuple[ShownLesson, ...]) -> str:
    return f"practised with {'a lesson' if len(lessons) == 1 else f'{len(lessons)} lessons'}"
