"""One conversation, from its first main turn to its close: durable, in ids only.

It waits for turns, has each judged as soon as another shows what came next, and closes when the client says so or
nothing comes any more. What it decides by is in its state and its messages; everything else is in Postgres.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from temporalio import workflow
from temporalio.common import Priority
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.judging.closing import LedgerActivities
    from activities.judging.judge_turn import JudgingActivities
    from activities.judging.messages import AskDirectly, Closed, CloseSession, Judged, JudgeTurn
    from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
    from clawloop.ids import TurnId
    from workflows import descriptions, names
    from workflows.policies import FINALIZE, JUDGE, STORE
    from workflows.reasons import reason_of
    from workflows.state import CARRIED_LIMIT, KNOWN_LIMIT, ROWS_LIMIT, SessionState, SessionSummary

SessionMessage = TurnRecorded | FeedbackGiven | RejudgeRequested

# Judging that takes longer than this is begun anew by the next run; stored votes are not asked for again.
ROLL_OVER_WAIT = timedelta(minutes=2)


@workflow.defn(name=names.SESSION_WORKFLOW)
class SessionWorkflow:
    @workflow.init
    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._inbox: list[SessionMessage] = list(state.carried)
        self._known: list[TurnId] = list(state.known)
        self._announced = state.announced
        self._rows: list[TurnResult] = list(state.rows)
        self._running: dict[asyncio.Task[None], SessionMessage] = {}
        self._ends = state.ends
        self._erased = state.erased
        self._looked_into = state.looked_into
        self._deadline = state.deadline or workflow.now() + self._idle_time
        self._shown_version = state.adapter_version
        self._closing = False
        self._bug: BaseException | None = None

    @workflow.run
    async def run(self, state: SessionState) -> SessionSummary:
        watch = asyncio.create_task(self._watch_deadline())
        self._show()
        while True:
            await workflow.wait_condition(self._has_something_to_do)
            if self._bug is not None:
                raise self._bug  # the workflow waits here until we have mended it
            if self._must_roll_over():
                await self._roll_over()
            elif self._can_begin():
                self._begin(self._inbox.pop(0))
            else:
                closed = await self._close()
                if closed.still_open:
                    self._looked_into = False
                elif not self._inbox:
                    workflow.upsert_search_attributes([names.STATE.value_set("closed")])
                    return SessionSummary(turns=closed.turns, why=self._why_closing, guarantee=closed.guarantee)
                self._closing = False
            if watch.done() and not self._is_idle():
                watch = asyncio.create_task(self._watch_deadline())
            self._show()

    @workflow.signal(name=names.TURN_RECORDED)
    def turn_recorded(self, turn: TurnRecorded) -> None:
        if turn.turn_id in self._known:
            return
        self._known = [*self._known, turn.turn_id][-KNOWN_LIMIT:]
        self._announced += 1
        self._looked_into = False
        self._deadline = workflow.now() + self._idle_time
        self._inbox.append(turn)

    @workflow.signal(name=names.FEEDBACK_GIVEN)
    def feedback_given(self, feedback: FeedbackGiven) -> None:
        self._look_into()
        self._deadline = workflow.now() + self._idle_time
        self._inbox.append(feedback)

    @workflow.signal(name=names.JUDGE_AGAIN)
    def rejudge(self, wanted: RejudgeRequested) -> None:
        if wanted in self._inbox or wanted in self._running.values():
            return
        self._look_into()
        self._deadline = workflow.now() + self._idle_time
        self._inbox.append(wanted)

    @workflow.signal(name=names.CONTENT_ERASED)
    def content_erased(self, erased: ContentErased) -> None:
        newest = max(erased.turns, default=None)

        def gone(turn_id: TurnId) -> bool:
            return turn_id in erased.turns or (erased.whole and newest is not None and turn_id <= newest)

        # What is being judged now finds the turn erased when it wants to keep something of it.
        self._inbox = [told for told in self._inbox if not gone(told.turn_id)]
        self._rows = [descriptions.erased_row(row) if gone(row.turn_id) else row for row in self._rows]
        if erased.whole and all(gone(turn_id) for turn_id in self._known):
            self._ends = self._erased = True
        self._show()

    def _look_into(self) -> None:
        # Sessions that were looked into before this was so still wait for their deadline.
        if not self._announced and not self._looked_into:
            self._looked_into = workflow.patched(names.CLOSES_AGAIN)

    # Waiting -------------------------------------------------------------------------------------------------------

    @property
    def _idle_time(self) -> timedelta:
        return timedelta(seconds=self._state.idle_seconds)

    async def _watch_deadline(self) -> None:
        # One timer for many turns: each turn only moves the deadline.
        while (left := self._deadline - workflow.now()) > timedelta(0):
            await workflow.sleep(left, summary="the session's idle deadline")

    def _is_idle(self) -> bool:
        return workflow.now() >= self._deadline

    def _has_something_to_do(self) -> bool:
        return self._can_begin() or self._may_close() or self._must_roll_over() or self._bug is not None

    def _can_begin(self) -> bool:
        return bool(self._inbox) and len(self._running) < self._state.in_flight

    def _may_close(self) -> bool:
        return not self._inbox and not self._running and (self._ends or self._looked_into or self._is_idle())

    @property
    def _why_closing(self) -> str:
        if self._erased:
            return "erased"
        if self._looked_into:
            return "it was closed before"
        return "the client ended the session" if self._ends else f"idle for {self._state.idle_seconds / 60:g} min"

    # Judging -------------------------------------------------------------------------------------------------------

    def _begin(self, message: SessionMessage) -> None:
        if isinstance(message, FeedbackGiven):
            ask = self._ask(message.turn_id).model_copy(update={"feedback_id": message.feedback_id})
            summary = "judge a turn by what its user said about it"
        elif isinstance(message, RejudgeRequested):
            ask = self._ask(message.turn_id).model_copy(update={"revision": message.revision})
            summary = "judge a turn again, as an operator asked"
        else:
            if not self._is_late(message):
                self._ends, self._erased = message.ends_session, False
            self._show_version(message.version)
            ask = self._ask(message.turn_id)
            summary = "judge the reply that a new turn answers"
        task = asyncio.create_task(self._judge(ask, summary))
        self._running[task] = message
        task.add_done_callback(self._ended)

    def _is_late(self, turn: TurnRecorded) -> bool:
        """A newer turn was told before it, and says whether the session ends."""
        newest = max(self._known, default=turn.turn_id)
        return turn.turn_id < newest and workflow.patched(names.ENDS_BY_NEWEST)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled():
            self._bug = self._bug or task.exception()
        self._show()

    def _ask(self, turn_id: TurnId) -> JudgeTurn:
        return JudgeTurn(session_id=self._state.session_id, turn_id=turn_id)

    async def _judge(self, ask: JudgeTurn, summary: str) -> None:
        # One chatty session must not keep the judges from the others.
        fair = Priority(fairness_key=str(self._state.session_id))
        judged = Judged(fates=[])
        try:
            judged = await workflow.execute_activity_method(
                JudgingActivities.judge_turn, ask, summary=summary, priority=fair, **JUDGE
            )
        except ActivityError as error:
            given_up = ask.model_copy(update={"give_up": reason_of(error)})
            try:
                judged = await workflow.execute_activity_method(
                    JudgingActivities.judge_turn,
                    given_up,
                    summary="decide with the votes there are",
                    priority=fair,
                    **FINALIZE,
                )
            except ActivityError as still:
                # The turn waits; closing the session ends it with a reason.
                workflow.logger.warning("a turn could not be decided: %s", reason_of(still))
        self._remember(judged.fates)

    def _remember(self, fates: list[TurnResult]) -> None:
        told = {result.turn_id for result in fates}
        kept = [row for row in self._rows if row.turn_id not in told]
        self._rows = sorted([*kept, *fates], key=lambda row: row.number or 0)[-ROWS_LIMIT:]

    # Ending --------------------------------------------------------------------------------------------------------

    async def _close(self) -> Closed:
        """End the session in Postgres; turns it still finds to be judged are judged first."""
        self._closing = True
        self._show()
        tried: set[TurnId] = set()
        # A turn that comes from now on is none of this closing's.
        ask = CloseSession(
            session_id=self._state.session_id,
            why=self._why_closing,
            up_to=max(self._known, default=None),
            again=self._looked_into,
        )
        while True:
            closed = await self._closing_step(ask)
            fresh = [turn_id for turn_id in closed.to_judge if turn_id not in tried]
            if closed.to_judge and not fresh:
                closed = await self._closing_step(ask.model_copy(update={"give_up": True}))
            if closed.to_ask:
                await self._collect_direct_votes(closed.to_ask)
                ask = ask.model_copy(update={"asked_directly": True})
                continue
            if not closed.to_judge:
                self._remember(closed.fates)
                self._show()
                return closed
            for turn_id in fresh:
                tried.add(turn_id)
                ask = ask.model_copy(update={"tried_up_to": max(tried)})
                itself = self._ask(turn_id).model_copy(update={"itself": True})
                await self._judge(itself, "judge a turn that was missed")

    async def _collect_direct_votes(self, turns: Sequence[TurnId]) -> None:
        """A direct vote for each; one that cannot be had is not waited for."""
        asking = [
            workflow.execute_activity_method(
                JudgingActivities.collect_direct_vote,
                AskDirectly(session_id=self._state.session_id, turn_id=turn_id),
                summary="ask a direct vote, because the votes cancel out",
                priority=Priority(fairness_key=str(self._state.session_id)),
                **JUDGE,
            )
            for turn_id in turns
        ]
        for failed in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(failed, ActivityError):
                workflow.logger.warning("a direct vote could not be had: %s", reason_of(failed))
            elif failed is not None:
                raise failed

    async def _closing_step(self, ask: CloseSession) -> Closed:
        return await workflow.execute_activity_method(
            LedgerActivities.close_session, ask, summary=f"close the session: {ask.why}", **STORE
        )

    def _must_roll_over(self) -> bool:
        limit = self._state.roll_over_events
        if limit is not None:
            return workflow.info().get_current_history_length() >= limit
        return workflow.info().is_continue_as_new_suggested()

    async def _roll_over(self) -> None:
        """Begin a new run with all that is not done."""
        try:
            await workflow.wait_condition(lambda: not self._running, timeout=ROLL_OVER_WAIT)
        except TimeoutError:
            self._inbox = [*self._running.values(), *self._inbox]
            for task in self._running:
                task.cancel()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(
            self._state.model_copy(
                update={
                    "adapter_version": self._shown_version,
                    "announced": self._announced,
                    "known": self._known,
                    "carried": self._inbox[-CARRIED_LIMIT:],
                    "rows": self._rows,
                    "deadline": self._deadline,
                    "ends": self._ends,
                    "erased": self._erased,
                    "looked_into": self._looked_into,
                }
            )
        )

    # The UI --------------------------------------------------------------------------------------------------------

    def _show_version(self, version: int) -> None:
        if version != self._shown_version:
            self._shown_version = version
            workflow.upsert_search_attributes([names.VERSION.value_set(version)])

    def _show(self) -> None:
        if self._closing:
            closing = f"Closing: {self._why_closing}."
        else:
            closing = f"Closes at {self._deadline:%Y-%m-%d %H:%M} UTC unless a turn comes."
        line = descriptions.session_headline(
            announced=self._announced, judging=len(self._running), waiting=len(self._inbox), closing=closing
        )
        workflow.set_current_details(f"{line}\n\n{descriptions.session_table(self._rows)}")
