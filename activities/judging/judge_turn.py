"""The activities that judge: a turn that became judgeable, and a direct vote for a closing session.

Answers of a judge are stored as they come, and a retry asks only for the missing ones.
An answer that stays missing is a missing vote, never a zero.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from temporalio import activity

from activities.judging.evaluation import Case, Evaluator, count_answers
from activities.judging.messages import (
    TRAINED_LIMIT,
    CollectDirectVote,
    Judged,
    JudgeTurn,
    JudgeTurns,
    main_turn_result,
    unknown_turn_result,
    with_trained_turns,
)
from activities.judging.ports import Judge, JudgementStore, Render
from activities.judging.vote_collector import VoteCollector
from activities.notify import TrainingNotifier
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import ClawloopError, PermanentError
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import TurnId
from clawloop.core.judging.next_state_lookup import find_next_state, judgeable_by
from clawloop.core.judging.plan import Action, JudgingPlan, plan_judging
from clawloop.core.judging.records import FinalizedJudgement, JudgingContext, OpenJudgement, Relation, TurnContext
from clawloop.core.samples.decision import is_held_out
from clawloop.core.turns.next_state import NextState

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

log = logging.getLogger(__name__)

# As many turns of one session as its workflow has judged at once. All wait for the same judge, which takes 8 requests.
JUDGED_AT_ONCE = 4


class JudgingActivities:
    """On the queue `judge`."""

    def __init__(
        self,
        store: JudgementStore,
        judge: Judge,
        render: Render,
        training: TrainingNotifier,
        counts: WorkerMetrics | None = None,
    ) -> None:
        self._store = store
        self._judge = judge
        self._render = render
        self._training = training
        self._counts = counts
        self._locks: WeakValueDictionary[TurnId, asyncio.Lock] = WeakValueDictionary()

    @activity.defn
    async def judge_turn(self, request: JudgeTurn) -> Judged:
        """Judge the turns that a turn makes judgeable; or the turn itself, if asked to."""
        async with heartbeating():
            return await self._judge_request(request)

    @activity.defn
    async def judge_turns(self, request: JudgeTurns) -> Judged:
        """Judge several turns, `JUDGED_AT_ONCE` at a time.

        Raises:
            ClawloopError: a turn could not be judged. The other turns are judged, and a retry finds them decided. An
                error that a retry may mend is raised rather than one that it cannot, so that no turn is given up early.
        """
        errors: list[ClawloopError] = []
        free = asyncio.Semaphore(JUDGED_AT_ONCE)

        async def judge(single: JudgeTurn) -> list[TurnResult]:
            async with free:
                try:
                    return (await self._judge_request(single)).results
                except ClawloopError as error:
                    errors.append(error)
                    return []

        async with heartbeating(), asyncio.TaskGroup() as group:
            judging = [group.create_task(judge(single)) for single in request.single()]
        results = [task.result() for task in judging]
        if errors:
            raise min(errors, key=lambda failed: isinstance(failed, PermanentError))
        # A turn may be in several lists, and a step may have trained it between two of them.
        return Judged(results=list({result.turn_id: result for each in results for result in each}.values()))

    async def _judge_request(self, request: JudgeTurn) -> Judged:
        loaded = await self._store.load_judging(request.turn_id, TRAINED_LIMIT)
        if loaded is None:
            return Judged(results=[unknown_turn_result(request.turn_id)])
        results = [await self._judge_one(request, *judgeable) for judgeable in await self._find(request, loaded)]
        reported = [result for result in results if result is not None]
        return Judged(results=with_trained_turns(reported, loaded.trained))

    @activity.defn
    async def collect_direct_vote(self, request: CollectDirectVote) -> None:
        """Ask for one direct vote on a judged turn and store it; the session's closing decides by it."""
        async with heartbeating():
            context = await self._store.load_context(request.turn_id)
            if context is None or context.turn.outcome is TurnOutcome.ERASED:
                return
            state = await find_next_state(self._store.load_context, context)
            case = Case(context, state)
            collector = self._collector(case, await self._store.revise(*case.key))
            vote = await collector.direct_vote()
            count_answers(self._counts, "vote", [vote.verdict])
            if collector.problems:
                log.warning(
                    "no direct vote", extra={"turn_id": str(request.turn_id), "why": "; ".join(collector.problems)}
                )

    async def _find(self, request: JudgeTurn, loaded: JudgingContext) -> list[tuple[TurnContext, NextState | None]]:
        if request.itself or request.feedback_id is not None or request.revision is not None:
            return [(loaded.turn, await find_next_state(self._store.load_context, loaded.turn))]
        return [*await judgeable_by(self._store.load_context, loaded.turn, loaded.before)]

    async def _judge_one(self, request: JudgeTurn, context: TurnContext, state: NextState | None) -> TurnResult | None:
        """The turn's result; None if there is nothing to judge it by yet.

        One signal at a time judges a turn here: two would both ask for the votes that neither has stored yet. A turn
        that a gateway's disk held and the one that follows it may be signalled together, and both make it judgeable.
        Feedback does not wait for a judge that thinks, nor does what asks none.
        """
        if request.feedback_id is not None or request.give_up is not None:
            return await self._judge_now(request, context, state)
        turn_id = context.turn.record.turn_id
        lock = self._locks.setdefault(turn_id, asyncio.Lock())
        is_judged_now = lock.locked()
        async with lock:
            if is_judged_now:
                reloaded = await self._store.load_context(turn_id)
                if reloaded is None:
                    return unknown_turn_result(turn_id)
                context, state = reloaded, await find_next_state(self._store.load_context, reloaded)
            return await self._judge_now(request, context, state)

    async def _judge_now(self, request: JudgeTurn, context: TurnContext, state: NextState | None) -> TurnResult | None:
        case = Case(context, state, request.give_up)
        plan = plan_judging(
            context.current,
            has_next_state=state is not None,
            feedback=case.feedback,
            requested_revision=request.revision,
            by_outcome=request.itself and context.task_outcome is not None,
            erased=context.turn.outcome is TurnOutcome.ERASED,
        )
        if plan.action is Action.SKIP:
            return _stored_result(context)
        if plan.action is Action.WAIT:
            return None
        judgement = await self._open(plan, case)
        collector = self._collector(case, judgement)
        finalized = await Evaluator(case, judgement, collector, self._render, self._counts).evaluate()
        if finalized.outcome is TurnOutcome.UNJUDGED and _has_verdict(context):
            # The stored votes wait for the next attempt, and the sweep notifies again of feedback not applied.
            return _stored_result(context, f"re-judging gave no verdict ({finalized.why}); the old one is kept: ")
        crash_point(CrashPoint.VOTES_STORED)
        ready_policy = await self._store.finalize(judgement.id, finalized, [given.id for given in case.feedback])
        await self._training.notify(ready_policy)
        return await self._finalized_result(plan, case, judgement, finalized)

    async def _open(self, plan: JudgingPlan, case: Case) -> OpenJudgement:
        # Revising keeps the stored votes; judging again, as an operator asked, opens a revision without votes.
        if plan.action is Action.REVISE:
            return await self._store.revise(*case.key)
        return await self._store.open(*case.key, revision=plan.revision)

    def _collector(self, case: Case, judgement: OpenJudgement) -> VoteCollector:
        return VoteCollector(self._store, self._judge, case.record, case.evidence, judgement, case.give_up)

    async def _finalized_result(
        self, plan: JudgingPlan, case: Case, judgement: OpenJudgement, finalized: FinalizedJudgement
    ) -> TurnResult:
        """The result after finalizing; what depends on the store is read from it."""
        context, turn_id = case.context, case.record.turn_id
        stored = None
        held_out = _may_be_held_out(case, judgement, finalized)
        if plan.action is Action.REJUDGE or finalized.relation is not Relation.NONE or held_out:
            stored = await self._store.load_context(turn_id)
        if stored is not None and (stored.current is None or stored.current.revision < plan.revision):
            # The store wrote nothing: a step took the older judgement's sample before this one was decided.
            return _stored_result(stored, "a step has its sample, so the old verdict is kept: ")
        if self._counts is not None:
            self._counts.judged(finalized.outcome)
        log.info("judged", extra={"turn_id": str(turn_id), "outcome": finalized.outcome})
        if stored is not None and (finalized.relation is not Relation.NONE or held_out):
            return main_turn_result(
                turn_id, stored.number, stored.turn.outcome, finalized.verdict.verdict, stored.turn.outcome_detail or ""
            )
        return main_turn_result(turn_id, context.number, finalized.outcome, finalized.verdict.verdict, finalized.why)


def _may_be_held_out(case: Case, judgement: OpenJudgement, finalized: FinalizedJudgement) -> bool:
    """True if the store may have held the turn's sample out, which it decides by the policy's recipe of that moment."""
    unit = case.record.group_id or case.context.turn.session_id
    share = judgement.recipe.gate.held_out
    return finalized.sampled and is_held_out(case.record.policy, unit, share)


def _has_verdict(context: TurnContext) -> bool:
    return context.current is not None and context.current.outcome is not TurnOutcome.UNJUDGED


def _stored_result(context: TurnContext, reason: str = "") -> TurnResult:
    turn, current = context.turn, context.current
    is_erased = turn.outcome is TurnOutcome.ERASED
    verdict = None if current is None or is_erased else current.verdict
    detail = turn.outcome_detail or ("erased" if is_erased else "")
    return main_turn_result(turn.record.turn_id, context.number, turn.outcome, verdict, f"{reason}{detail}")
