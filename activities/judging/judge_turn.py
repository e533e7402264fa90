"""The activities that judge: a turn that became judgeable, and a direct vote for a closing session.

Answers of a judge are stored as they come, and a retry asks only for the missing ones.
An answer that stays missing is a missing vote, never a zero.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from temporalio import activity

from activities.judging.evaluation import NOT_SPOKEN, Case, Evaluator, Render, count_answers
from activities.judging.vote_collector import AnswerStore, Judge, VoteCollector
from activities.notify import TrainingNotifier
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import ClawloopError, JudgeRefused, PermanentError
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import FeedbackId, JudgementId, SessionId, TurnId
from clawloop.core.judging.next_state_lookup import find_next_state, judgeable_by
from clawloop.core.judging.plan import Action, JudgingPlan, plan_judging
from clawloop.core.judging.prompts import lesson_prompt, parse_relation
from clawloop.core.judging.records import FinalizedJudgement, JudgingContext, OpenJudgement, Relation, TurnContext
from clawloop.core.lessons.ledger import digest_of
from clawloop.core.samples.decision import is_held_out
from clawloop.core.turns.next_state import NextState

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

log = logging.getLogger(__name__)

# As many turns of one session as its workflow has judged at once. All wait for the same judge, which takes 8 requests.
JUDGED_AT_ONCE = 4

# As many as the workflow's table of turns has rows.
TRAINED_LIMIT = 20
WHY_LIMIT = 200  # characters of a reason that cross Temporal; PostgreSQL holds the whole

# Messages -------------------------------------------------------------------------------------------------------------
# Inputs and results of the activities: ids, scores and reasons, never text.
#
# Durable: open workflows and saved histories hold these; later fields are optional.


class JudgeTurn(Message):
    """Judge the turn that `turn_id` follows, and `turn_id` itself if it was stored late.

    Args:
        turn_id: the turn that was recorded, or that was given feedback.
        feedback_id: judge `turn_id` itself, because of this feedback.
        itself: judge `turn_id` itself, by what follows it.
        give_up: ask no judge: missing answers stay missing, for this reason.
        revision: judge `turn_id` itself, as this revision, because an operator asked for it.
    """

    session_id: SessionId
    turn_id: TurnId
    feedback_id: FeedbackId | None = None
    itself: bool = False
    give_up: str | None = None
    revision: int | None = None


class JudgeTurns(Message):
    """Judge several turns of a session, each as `JudgeTurn` says, in one activity.

    Args:
        turn_ids: at least one.
        itself: judge each turn itself, by what follows it.
        give_up: ask no judge: missing answers stay missing, for this reason.
    """

    session_id: SessionId
    turn_ids: list[TurnId]
    itself: bool = False
    give_up: str | None = None

    def single(self) -> list[JudgeTurn]:
        """One request for each turn."""
        return [
            JudgeTurn(session_id=self.session_id, turn_id=turn_id, itself=self.itself, give_up=self.give_up)
            for turn_id in self.turn_ids
        ]


class CollectDirectVote(Message):
    """Ask for one direct vote on a judged turn and store it; the session's closing decides by it."""

    session_id: SessionId
    turn_id: TurnId


class Judged(Message):
    """
    Args:
        results: of the turns that could be judged, and of the session's newest trained turns.
    """

    results: list[TurnResult]


# Activities -----------------------------------------------------------------------------------------------------------


class JudgementStore(AnswerStore, Protocol):
    """Stores judgements, and each answer of a judge once."""

    async def lessons(self, policy: str) -> Sequence[ShownLesson]:
        """The newest lessons of a policy that are in its prompts or its weights, as many as a prompt may hold."""

    async def load_context(self, turn_id: TurnId) -> TurnContext | None:
        """A main turn, its neighbours and feedback; None for an unknown turn or a side turn."""

    async def trained_turns(self, session: SessionId, limit: int) -> list[TurnResult]:
        """The session's newest `limit` main turns that were trained, rolled back since or not, in their order."""

    async def load_judging(self, turn_id: TurnId, trained_limit: int) -> JudgingContext | None:
        """The contexts of a turn and of the one it follows, and `trained_turns`, in one transaction; None as there."""

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str, revision: int = 0
    ) -> OpenJudgement:
        """The turn's judgement of this revision: continued, or made now under its policy's recipe.

        Raises:
            RecordUnusable: the policy has no recipe, or the turn or the one that holds its next state was erased.
        """

    async def revise(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's newest judgement, to be amended; a further revision if a step has taken its sample.

        Raises:
            RecordUnusable: the policy has no recipe, or the turn or the one that holds its next state was erased.
        """

    async def finalize(
        self, judgement: JudgementId, finalized: FinalizedJudgement, feedback_ids: Sequence[FeedbackId]
    ) -> str | None:
        """Write verdict, hint, sample and the turn's outcome in one transaction; mark the feedback as applied.

        Samples of the turn's other judgements that no step has taken are superseded. If a step has taken one, only
        new feedback makes a further sample: without any, nothing is written and the turn stays as it is.

        Args:
            feedback_ids: the feedback that `finalized` takes into account.

        Returns:
            The policy's id if its batch became ready with this call; None if no batch is ready, or one was before.

        Raises:
            RecordUnusable: the turn, or the one that holds its next state, was erased.
            StoreUnavailable: also when the decision is outdated. A step took the sample that was to be amended (then
                `revise` makes another judgement); feedback not in `feedback_ids` was applied (a judge's late answer
                must not undo it); or the stored votes are not those of the ballot (a retry reads them).
        """


class JudgingActivities:
    """Activities that judge turns; on the queue `judge`."""

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
            said_behind_tools=state.next_turn_id if state is not None and state.behind_tools else None,
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
        finalized = await self._compared(case, judgement, finalized)
        crash_point(CrashPoint.VOTES_STORED)
        ready_policy = await self._store.finalize(judgement.id, finalized, [given.id for given in case.feedback])
        await self._training.notify(ready_policy)
        is_silent = judgement.recipe.signal.learns_from_words and finalized.hint is NOT_SPOKEN
        if is_silent and (said := await self._said_meanwhile(case)) is not None:
            return await self._judge_now(request, *said)
        return await self._finalized_result(plan, case, judgement, finalized)

    async def _compared(
        self, case: Case, judgement: OpenJudgement, finalized: FinalizedJudgement
    ) -> FinalizedJudgement:
        """The judgement whose correction, if it has one, names the lesson that it repeats or takes the place of.

        A judge says so. Without one nothing does: people replace lessons.

        Raises:
            JudgeUnavailable: retry later.
        """
        correction, signal = finalized.correction, judgement.recipe.signal
        if correction is None or not signal.asks_for_hints or case.give_up is not None:
            return finalized
        policy, turn_id = case.record.policy, case.record.turn_id
        known = await self._store.lessons(policy)
        if not known or digest_of(correction.text) in {digest_of(lesson.text) for lesson in known}:
            return finalized
        form = await self._judge.form(policy, signal.judge_form)
        prompt = lesson_prompt(turn_id, [lesson.text for lesson in known], correction.text, form)
        try:
            answers = await self._judge.answers(policy, prompt, 1, 0.0)
        except JudgeRefused:
            return finalized
        found = parse_relation(answers[0].text, prompt) if answers and not answers[0].cut else None
        if found is None or found[1] not in range(len(known)):
            return finalized
        other = known[found[1]].id
        is_same = found[0] == "same"
        related = replace(correction, repeats=other) if is_same else replace(correction, replaces=other)
        return replace(finalized, correction=related)

    async def _said_meanwhile(self, case: Case) -> tuple[TurnContext, NextState] | None:
        """The case again with what the user said behind its tools; None if that comes later, and has it judged again.

        Turns that come together are judged together: whoever looked for this one had to find it judged.
        """
        context = await self._store.load_context(case.record.turn_id)
        state = None if context is None else await find_next_state(self._store.load_context, context)
        return None if context is None or state is None or not state.behind_tools else (context, state)

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


# Rows -----------------------------------------------------------------------------------------------------------------
# Rows of a session workflow's table.


def main_turn_result(turn_id: TurnId, number: int, outcome: TurnOutcome, verdict: int | None, why: str) -> TurnResult:
    """The row of a main turn; its step is filled in by `with_trained_turns`."""
    return TurnResult(
        turn_id=turn_id,
        number=number,
        kind=TurnKind.MAIN,
        outcome=outcome,
        verdict=verdict,
        sample=outcome in (TurnOutcome.SAMPLED, TurnOutcome.TRAINED),
        step=None,
        why=why[:WHY_LIMIT],
    )


def unknown_turn_result(turn_id: TurnId) -> TurnResult:
    """The row of a turn that is not stored, or is no main turn."""
    return TurnResult(
        turn_id=turn_id,
        number=None,
        kind="unknown",
        outcome=None,
        verdict=None,
        sample=False,
        step=None,
        why="no main turn of this id is stored",
    )


def with_trained_turns(results: Sequence[TurnResult], trained_turns: Sequence[TurnResult]) -> list[TurnResult]:
    """`results` and the session's newest trained turns, each turn once if `results` has each once.

    Nothing notifies a session's workflow of training steps: it learns of them with the next judgement or closing.
    """
    trained = {result.turn_id: result for result in trained_turns}
    updated = [
        result
        if (newest := trained.pop(result.turn_id, None)) is None
        else result.model_copy(update={"outcome": newest.outcome, "sample": True, "step": newest.step})
        for result in results
    ]
    return [*updated, *trained.values()]
