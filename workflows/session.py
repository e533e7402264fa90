"""One conversation, from its first main turn to its close. Its state is durable and holds ids, never text.

It waits for turns, has each turn judged as soon as a later request holds what followed its reply, and closes when the
client ends the session or nothing comes any more. It decides by its state and its messages; everything else is in
PostgreSQL.

A main turn is one that may be trained. Side turns (a client's heartbeats, summaries) are recorded, and no workflow is
notified of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import cast

from temporalio import workflow
from temporalio.common import Priority
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.judging.closing import Closed, CloseSession, ClosingActivities
    from activities.judging.judge_turn import CollectDirectVote, Judged, JudgeTurn, JudgeTurns, JudgingActivities
    from clawloop.core.contracts.sessions import (
        ContentErased,
        FeedbackGiven,
        RejudgeRequested,
        TurnRecorded,
        TurnResult,
    )
    from clawloop.core.ids import TurnId
    from workflows import descriptions, names
    from workflows.activity_options import (
        FINALIZE,
        JUDGE,
        JUDGE_TOGETHER,
        JUDGED_TOGETHER_LIMIT,
        STORE,
        ActivityOptions,
    )
    from workflows.long_running import LongRunningWorkflow, reason_of
    from workflows.page_links import NO_PAGE
    from workflows.state import INBOX_LIMIT, KNOWN_LIMIT, ROWS_LIMIT, SessionState, SessionSummary, kept_for_next_run

SessionMessage = TurnRecorded | FeedbackGiven | RejudgeRequested

# Judging that takes longer than this is started again by the next run; judges are not asked again for stored votes.
ROLL_OVER_WAIT = timedelta(minutes=2)
# How much a history may grow, while its judge is away, beyond where it should have ended. With Clawloop's Temporal,
# which suggests its end at 1,000 events, it is then about as long as the longest that was measured, which a
# new worker replays within a workflow task's 10 s. Some 700 turns that come one by one wait by then.
MORE_EVENTS = 3000


@workflow.defn(name=names.SESSION_WORKFLOW)
class SessionWorkflow(LongRunningWorkflow):
    @workflow.init
    def __init__(self, state: SessionState) -> None:
        super().__init__(state.roll_over_events)
        self._state = state
        self._deadline: datetime = state.deadline or workflow.now() + self._idle_time
        self._judging: dict[asyncio.Task[None], list[SessionMessage]] = {}
        self._closing = False
        self._due_at: int | None = None  # events of the history when it should first have ended

    @workflow.run
    async def run(self, state: SessionState) -> SessionSummary:
        timer = asyncio.create_task(self._sleep_until_deadline())
        self._show()
        while True:
            await workflow.wait_condition(self._has_work)
            self._raise_bug()
            if self._must_roll_over():
                await self._roll_over()
            elif self._can_judge():
                self._start_judging(self._take_waiting())
            elif (summary := await self._close()) is not None:
                return summary
            if timer.done() and not self._is_idle():
                timer = asyncio.create_task(self._sleep_until_deadline())
            self._show()

    # Messages --------------------------------------------------------------------------------------------------------

    @workflow.signal(name=names.TURN_RECORDED)
    def turn_recorded(self, turn: TurnRecorded) -> None:
        if turn.turn_id in self._state.known:
            return
        self._state.known = [*self._state.known, turn.turn_id][-KNOWN_LIMIT:]
        self._state.turns += 1
        self._state.closes_again = False
        if turn.opens_session:
            self._move_deadline()
            self._follow(turn)
            self._show()
        else:
            self._enqueue(turn)

    @workflow.signal(name=names.FEEDBACK_GIVEN)
    def feedback_given(self, feedback: FeedbackGiven) -> None:
        self._mark_closes_again()
        self._enqueue(feedback)

    @workflow.signal(name=names.REJUDGE)
    def rejudge(self, request: RejudgeRequested) -> None:
        if request in self._state.carried or request in self._messages_in_judging():
            return
        self._mark_closes_again()
        self._enqueue(request)

    @workflow.signal(name=names.CONTENT_ERASED)
    def content_erased(self, erased: ContentErased) -> None:
        newest = max(erased.turns, default=None)

        def is_erased(turn_id: TurnId) -> bool:
            return turn_id in erased.turns or (erased.whole and newest is not None and turn_id <= newest)

        # Judging in progress notices the erasure when it stores a vote or the judgement.
        state = self._state
        state.carried = [message for message in state.carried if not is_erased(message.turn_id)]
        state.rows = [descriptions.erased_row(row) if is_erased(row.turn_id) else row for row in state.rows]
        if erased.whole and all(is_erased(turn_id) for turn_id in state.known):
            state.ends = state.erased = True
        self._show()

    def _enqueue(self, message: SessionMessage) -> None:
        self._move_deadline()
        self._state.carried.append(message)

    def _move_deadline(self) -> None:
        self._deadline = workflow.now() + self._idle_time

    def _mark_closes_again(self) -> None:
        if not self._state.turns:
            self._state.closes_again = True

    # Waiting -------------------------------------------------------------------------------------------------------

    @property
    def _idle_time(self) -> timedelta:
        return timedelta(seconds=self._state.idle_seconds)

    async def _sleep_until_deadline(self) -> None:
        # One timer for many turns: each turn only moves the deadline.
        while (left := self._deadline - workflow.now()) > timedelta(0):
            await workflow.sleep(left, summary="the session's idle deadline")

    def _is_idle(self) -> bool:
        return workflow.now() >= self._deadline

    def _has_work(self) -> bool:
        return self._can_judge() or self._can_close() or self._must_roll_over() or self._bug is not None

    def _can_judge(self) -> bool:
        return bool(self._state.carried) and len(self._judging) < self._state.in_flight

    def _can_close(self) -> bool:
        if self._state.carried or self._judging:
            return False
        return self._state.ends or self._state.closes_again or self._is_idle()

    # Judging -------------------------------------------------------------------------------------------------------

    def _take_waiting(self) -> list[SessionMessage]:
        """The oldest message that waits; if it is a turn, with the turns right behind it."""
        carried = self._state.carried
        waiting = list(itertools.takewhile(lambda message: isinstance(message, TurnRecorded), carried))
        count = min(max(len(waiting), 1), JUDGED_TOGETHER_LIMIT)
        taken, self._state.carried = carried[:count], carried[count:]
        return taken

    def _start_judging(self, messages: list[SessionMessage]) -> None:
        message = messages[0]
        request = self._judge_request(message.turn_id)
        if isinstance(message, FeedbackGiven):
            request = request.model_copy(update={"feedback_id": message.feedback_id})
            judging = self._judge(request, "judge a turn by its user's feedback")
        elif isinstance(message, RejudgeRequested):
            request = request.model_copy(update={"revision": message.revision})
            judging = self._judge(request, "judge a turn again, as an operator asked")
        else:
            for turn in messages:
                self._follow(cast(TurnRecorded, turn))
            if len(messages) == 1:
                judging = self._judge(request, "judge the reply that a new turn follows")
            else:
                turn_ids = [turn.turn_id for turn in messages]
                together = JudgeTurns(session_id=self._state.session_id, turn_ids=turn_ids)
                judging = self._judge(together, f"judge the replies that {len(messages)} new turns follow")
        task = asyncio.create_task(judging)
        self._judging[task] = messages
        task.add_done_callback(self._on_judged)

    def _follow(self, turn: TurnRecorded) -> None:
        """Take over from a new turn whether the session ends, and its version."""
        if not self._is_late(turn):
            self._state.ends, self._state.erased = turn.ends_session, False
        self._show_version(turn.version)

    def _messages_in_judging(self) -> list[SessionMessage]:
        return [message for messages in self._judging.values() for message in messages]

    def _is_late(self, turn: TurnRecorded) -> bool:
        """True if a newer turn was signalled before this one; then the newer one decides whether the session ends."""
        return turn.turn_id < max(self._state.known, default=turn.turn_id)

    def _on_judged(self, task: asyncio.Task[None]) -> None:
        del self._judging[task]
        self._on_done(task)
        self._show()

    def _judge_request(self, turn_id: TurnId) -> JudgeTurn:
        return JudgeTurn(session_id=self._state.session_id, turn_id=turn_id)

    @property
    def _priority(self) -> Priority:
        # Fair scheduling: a session with many turns must not delay the judging of other sessions.
        return Priority(fairness_key=str(self._state.session_id))

    async def _judge(self, request: JudgeTurn | JudgeTurns, summary: str) -> None:
        judged = Judged(results=[])
        try:
            judged = await self._run_judging(
                request, summary, JUDGE if isinstance(request, JudgeTurn) else JUDGE_TOGETHER
            )
        except ActivityError as error:
            request = request.model_copy(update={"give_up": reason_of(error)})
            try:
                judged = await self._run_judging(request, "decide with the stored votes", FINALIZE)
            except ActivityError as second_error:
                # The turns stay undecided; closing the session decides them, with a reason.
                workflow.logger.warning("a turn could not be decided: %s", reason_of(second_error))
        self._record(judged.results)

    async def _run_judging(self, request: JudgeTurn | JudgeTurns, summary: str, options: ActivityOptions) -> Judged:
        if isinstance(request, JudgeTurn):
            return await workflow.execute_activity_method(
                JudgingActivities.judge_turn, request, summary=summary, priority=self._priority, **options
            )
        return await workflow.execute_activity_method(
            JudgingActivities.judge_turns, request, summary=summary, priority=self._priority, **options
        )

    def _record(self, results: list[TurnResult]) -> None:
        decided = {result.turn_id for result in results}
        others = [row for row in self._state.rows if row.turn_id not in decided]
        self._state.rows = sorted([*others, *results], key=lambda row: row.number or 0)[-ROWS_LIMIT:]

    # Closing -------------------------------------------------------------------------------------------------------

    async def _close(self) -> SessionSummary | None:
        """Close the session, if nothing comes meanwhile; None if it goes on."""
        self._closing = True
        self._show()
        closed = await self._close_in_ledger()
        if closed.still_open:
            self._state.closes_again = False
        elif not self._state.carried:
            workflow.upsert_search_attributes([names.STATE.value_set("closed")])
            return SessionSummary(turns=closed.turns, why=self._why_closing, guarantee=closed.guarantee)
        self._closing = False
        return None

    async def _close_in_ledger(self) -> Closed:
        """Close the session in PostgreSQL; turns that it finds without a judgement are judged first."""
        tried: set[TurnId] = set()
        # A turn that comes from now on is not part of this closing.
        request = CloseSession(
            session_id=self._state.session_id,
            why=self._why_closing,
            up_to=max(self._state.known, default=None),
            again=self._state.closes_again,
        )
        while True:
            closed = await self._close_session(request)
            fresh = [turn_id for turn_id in closed.to_judge if turn_id not in tried]
            if closed.to_judge and not fresh:
                closed = await self._close_session(request.model_copy(update={"give_up": True}))
            if closed.to_ask:
                await self._collect_direct_votes(closed.to_ask)
                request = request.model_copy(update={"asked_directly": True})
                continue
            if not closed.to_judge:
                self._record(closed.results)
                self._show()
                return closed
            tried.update(fresh)
            if fresh:
                request = request.model_copy(update={"tried_up_to": max(tried)})
                await self._judge_missed(fresh)

    async def _judge_missed(self, turns: Sequence[TurnId]) -> None:
        for first in range(0, len(turns), JUDGED_TOGETHER_LIMIT):
            together = list(turns[first : first + JUDGED_TOGETHER_LIMIT])
            if len(together) == 1:
                missed = self._judge_request(together[0]).model_copy(update={"itself": True})
                await self._judge(missed, "judge a turn that was missed")
            else:
                all_missed = JudgeTurns(session_id=self._state.session_id, turn_ids=together, itself=True)
                await self._judge(all_missed, f"judge {len(together)} turns that were missed")

    async def _close_session(self, request: CloseSession) -> Closed:
        return await workflow.execute_activity_method(
            ClosingActivities.close_session, request, summary=f"close the session: {request.why}", **STORE
        )

    async def _collect_direct_votes(self, turns: Sequence[TurnId]) -> None:
        """Collect a direct vote for each turn; a vote that fails is left out."""
        collecting = [
            workflow.execute_activity_method(
                JudgingActivities.collect_direct_vote,
                CollectDirectVote(session_id=self._state.session_id, turn_id=turn_id),
                summary="ask for a direct vote, because the votes cancel out",
                priority=self._priority,
                **JUDGE,
            )
            for turn_id in turns
        ]
        for error in await asyncio.gather(*collecting, return_exceptions=True):
            if isinstance(error, ActivityError):
                workflow.logger.warning("no direct vote: %s", reason_of(error))
            elif error is not None:
                raise error

    @property
    def _why_closing(self) -> str:
        if self._state.erased:
            return "erased"
        if self._state.closes_again:
            return "it was closed before"
        if self._state.ends:
            return "the client ended the session"
        return f"idle for {self._state.idle_seconds / 60:g} min"

    # Continue as new -----------------------------------------------------------------------------------------------

    def _must_roll_over(self) -> bool:
        """Later, up to MORE_EVENTS, where more messages wait than the next run takes over.

        The oldest turns that it does not take over wait for the session's closing.
        """
        if not super()._must_roll_over():
            return False
        if self._due_at is None:
            self._due_at = workflow.info().get_current_history_length()
        waiting = len(self._messages_in_judging()) + len(self._state.carried)
        if waiting <= INBOX_LIMIT:
            return True
        more = MORE_EVENTS if self._state.roll_over_events is None else 3 * self._state.roll_over_events
        return workflow.info().get_current_history_length() >= self._due_at + more

    async def _roll_over(self) -> None:
        """Continue as new with all messages that are not handled; return if too many came meanwhile."""

        def has_waited() -> bool:
            return not self._judging or not self._must_roll_over() or self._bug is not None

        with suppress(TimeoutError):
            await workflow.wait_condition(has_waited, timeout=ROLL_OVER_WAIT)
        self._raise_bug()
        if not self._must_roll_over():
            return
        await workflow.wait_condition(workflow.all_handlers_finished)
        # Judging is not cancelled: that would schedule an activity after the continue-as-new, which Temporal refuses.
        # Its worker learns from its next heartbeat that the run is gone.
        messages = [*self._messages_in_judging(), *self._state.carried]
        self._state.carried = kept_for_next_run(messages)
        if left := len(messages) - len(self._state.carried):
            workflow.logger.warning("%d messages are left to the session's closing: its history is too long", left)
        self._state.deadline = self._deadline
        workflow.continue_as_new(self._state)

    # The UI --------------------------------------------------------------------------------------------------------

    def _show_version(self, version: int) -> None:
        if version != self._state.adapter_version:
            self._state.adapter_version = version
            workflow.upsert_search_attributes([names.VERSION.value_set(version)])

    def _show(self) -> None:
        if self._closing:
            closing = f"Closing: {self._why_closing}."
        else:
            closing = f"Closes at {self._deadline:%Y-%m-%d %H:%M} UTC unless a turn comes."
        headline = descriptions.session_headline(
            turns=self._state.turns,
            judging=len(self._judging),
            waiting=len(self._state.carried),
            closing=closing,
        )
        place = NO_PAGE.of_session(self._state.policy, self._state.session_id)
        workflow.set_current_details(f"{headline}\n\n{descriptions.session_table(self._state.rows)}\n\n{place}")
