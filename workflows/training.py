"""Training of one policy, for as long as the policy exists: each full batch becomes a step, each step a version.

A version is a candidate first; the gate's decision makes it the head, or rejects it.

The workflow only decides the order. All it decides by is in PostgreSQL, which operators write before they notify it:
so it can be terminated and started again at any point, and changes made while Temporal was away hold.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from temporalio import workflow
from temporalio.common import Priority
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.practice import PracticeActivities, Practise
    from activities.serving.publishing import PublishingActivities, PublishVersion
    from activities.training.gate import DecideVersion, GateActivities
    from activities.training.probe_version import AskBase, ProbeActivities, ProbeVersion
    from activities.training.steps import REASON_LIMIT, AbandonStep, ClaimBatch, QuarantineStep, StepActivities
    from activities.training.train_step import StepDone, TrainingActivities, TrainStep
    from clawloop.core.contracts.training import (
        Claim,
        OperatorAction,
        OperatorChange,
        StepState,
        TrainingState,
        TrainingView,
    )
    from workflows import descriptions, names
    from workflows.activity_options import ASK_BASE, PRACTISE, PROBE, PUBLISH, STORE, call_ledger, train_on
    from workflows.long_running import LongRunningWorkflow, error_type_of, reason_of
    from workflows.page_links import NO_PAGE
    from workflows.state import STEPS_LIMIT, PolicyTraining

# A version is decided without the general questions where the base model does not answer them for so long.
ASK_BASE_WAIT = timedelta(minutes=20)
# Publishing that takes longer than this is done again by the next run; engines keep what they have loaded.
ROLL_OVER_WAIT = timedelta(minutes=2)
# The error type of a step that was rolled back while the trainer computed it.
STEP_GONE = "RecordUnusable"
# Changes after which engines may lack the version that should answer.
_CHANGES_VERSION = (OperatorAction.ROLL_BACK, OperatorAction.PIN, OperatorAction.RELEASE)


@workflow.defn(name=names.TRAINING_WORKFLOW)
class TrainingWorkflow(LongRunningWorkflow):
    @workflow.init
    def __init__(self, state: PolicyTraining) -> None:
        super().__init__(state.roll_over_events)
        self._state = state
        self._policy = state.policy
        self._view: TrainingView | None = None
        self._work_waits = False
        self._operator_changed = False
        # After a start engines may lack the version that should answer.
        self._must_publish = True
        self._publishing = False
        self._computing: Claim | None = None
        self._computing_since: datetime = workflow.now()
        self._ended_step: int | None = None
        self._base_awaited = False
        self._store_problem = ""
        self._publish_problem = ""
        self._search_attributes: tuple[str, int] | None = None

    @workflow.run
    async def run(self, state: PolicyTraining) -> None:
        beside = (self._publish_versions(), self._follow_operators(), self._ask_base(), self._practise())
        tasks = [self._start(one) for one in beside]
        while True:
            if self._must_roll_over():
                await self._roll_over(tasks)
            self._work_waits = self._operator_changed = False
            if not await self._train_next_batch():
                await self._wait()

    # Messages; PostgreSQL holds what they are about -------------------------------------------------------------------

    @workflow.signal(name=names.WORK_WAITING)
    def work_waiting(self) -> None:
        self._work_waits = True

    @workflow.update(name=names.OPERATOR_CHANGED)
    def operator_changed(self, change: OperatorChange) -> None:
        self._state.operator_change = f"{change.action.replace('_', ' ')}: {change.detail}"[:REASON_LIMIT]
        self._operator_changed = True
        self._must_publish = self._must_publish or change.action in _CHANGES_VERSION

    @operator_changed.validator
    def _require_detail(self, change: OperatorChange) -> None:
        if not change.detail.strip():
            raise ValueError("detail: name the reason, version or recipe")

    # Training --------------------------------------------------------------------------------------------------------

    async def _train_next_batch(self) -> bool:
        """Read the ledger, claim a batch and train it; False if there is no batch now."""
        try:
            view = await self._read_view()
            claimed = await self._claim(view)
            if claimed is None:
                return False
            if claimed.state is StepState.CLAIMED:
                self._record(await self._step(view, claimed))
            elif claimed.state is StepState.CANDIDATE:  # an earlier run ended before the gate decided
                found = StepDone(policy=self._policy, n=claimed.n, state=claimed.state, samples=claimed.samples)
                self._record(await self._decide(found, view))
            self._ended_step = claimed.n
            return True
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._show_store_problem(error)
            return False

    async def _read_view(self) -> TrainingView:
        self._view = await call_ledger(StepActivities.read_training_status, self._policy, "read the training status")
        if self._view.unpublished and not self._publishing:
            self._must_publish = True
        self._store_problem = ""
        self._show()
        return self._view

    async def _claim(self, view: TrainingView) -> Claim | None:
        """The batch of the next step; None if there is none, e.g. while training is paused."""
        if view.state is TrainingState.PAUSED and view.step_state is StepState.CLAIMED:
            return None
        request = ClaimBatch(policy=self._policy, n=view.step)
        claimed = await call_ledger(StepActivities.claim_batch, request, f"a batch for step {view.step}")
        if claimed.state is None:
            return None
        if claimed.n == self._ended_step:
            # Step numbers are never reused. If the ledger returns an ended step all the same, wait instead of looping.
            self._store_problem = f"step {claimed.n} has ended, but PostgreSQL returned it again"
            self._show()
            return None
        return claimed

    async def _step(self, view: TrainingView, claimed: Claim) -> StepDone:
        self._computing, self._computing_since = claimed, workflow.now()
        self._show()
        try:
            done = await self._compute(view, claimed)
        finally:
            self._computing = None
        if done.state is StepState.QUARANTINED:
            await workflow.execute_activity_method(
                StepActivities.quarantine_step,
                QuarantineStep(policy=self._policy, n=done.n, reason=done.reason),
                summary=f"quarantine the samples of step {done.n}, and pause: {done.reason}",
                **STORE,
            )
        elif done.state is StepState.CANDIDATE:
            # Probes may have been added or removed while the step was computed.
            return await self._decide(done, await self._read_view())
        elif done.state is StepState.COMMITTED:
            self._must_publish = True
        return done

    async def _decide(self, done: StepDone, view: TrainingView) -> StepDone:
        """The step after the gate's decision about its version."""
        if view.general_unasked:
            await self._wait_for_base()
        not_probed = await self._probe(done.n) if view.probed else ""
        request = DecideVersion(policy=self._policy, n=done.n, not_probed=not_probed)
        decided = await call_ledger(GateActivities.decide_version, request, f"decide about version {done.n}")
        if decided.state is StepState.COMMITTED:
            self._must_publish = True
        decision = {"state": decided.state, "reason": decided.reason, "gate": decided.checks}
        return done.model_copy(update=decision)

    async def _probe(self, n: int) -> str:
        """Ask the version its probes; why they could not be asked, empty if they were."""
        try:
            await workflow.execute_activity_method(
                ProbeActivities.probe_version,
                ProbeVersion(policy=self._policy, n=n),
                summary=f"ask version {n} and its parent the probes",
                **PROBE,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return _reason(error)
        return ""

    async def _wait_for_base(self) -> None:
        """Wait until the base model was asked the general questions, so that the first version is compared with it."""
        try:
            await workflow.wait_condition(lambda: not self._base_unasked(), timeout=ASK_BASE_WAIT)
        except TimeoutError:
            workflow.logger.info("the base model has not answered the general questions yet")
            self._base_awaited = True  # later versions do not wait as long once more
        self._raise_bug()

    async def _compute(self, view: TrainingView, claimed: Claim) -> StepDone:
        try:
            return await workflow.execute_activity_method(
                TrainingActivities.train_step,
                TrainStep(policy=self._policy, n=claimed.n),
                summary=descriptions.step_summary(view, claimed),
                # Policies take turns at a trainer, however many batches one of them has.
                priority=Priority(fairness_key=self._policy),
                **train_on(view.pool),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise  # the workflow was cancelled; the batch is not at fault
            reason = _reason(error)
            if error_type_of(error) == STEP_GONE:
                await workflow.execute_activity_method(
                    StepActivities.abandon_step,
                    AbandonStep(policy=self._policy, n=claimed.n, reason=reason),
                    summary=f"abandon step {claimed.n}: {reason}",
                    **STORE,
                )
                state = StepState.ABANDONED
            else:
                state = StepState.QUARANTINED
            return StepDone(policy=self._policy, n=claimed.n, state=state, samples=claimed.samples, reason=reason)

    def _record(self, done: StepDone) -> None:
        self._state.steps = [*self._state.steps, done][-STEPS_LIMIT:]

    async def _wait(self) -> None:
        seconds, summary = self._state.quiet_seconds, "read the ledger again"
        view = self._view
        if view is not None and view.oldest_seconds is not None and view.max_wait_seconds is not None:
            left = max(view.max_wait_seconds - view.oldest_seconds, 1.0)
            if view.state is not TrainingState.PAUSED and left < seconds:
                seconds, summary = left, "the oldest sample has waited long enough"
        condition = self._has_work
        if view is not None and view.closed_seconds is not None and view.state is not TrainingState.PAUSED:
            # Samples that arrive meanwhile change nothing; an operator's change may.
            seconds, summary = min(self._state.quiet_seconds, max(view.closed_seconds, 1.0)), "the schedule opens"
            condition = self._must_look_again
        try:
            await workflow.wait_condition(condition, timeout=seconds, timeout_summary=summary)
        except TimeoutError:
            return
        self._raise_bug()

    def _has_work(self) -> bool:
        return self._work_waits or self._must_look_again()

    def _must_look_again(self) -> bool:
        return self._operator_changed or self._must_roll_over() or self._bug is not None

    # Beside training -------------------------------------------------------------------------------------------------

    async def _publish_versions(self) -> None:
        """Publish the newest version; one that is committed meanwhile is published next."""
        while True:
            await workflow.wait_condition(lambda: self._must_publish)
            self._must_publish, self._publishing = False, True
            self._show()
            try:
                published = await workflow.execute_activity_method(
                    PublishingActivities.publish_version,
                    PublishVersion(policy=self._policy),
                    summary="publish the newest version",
                    **PUBLISH,
                )
            except ActivityError as error:
                self._publish_problem = f"not published: {_reason(error)}"
            else:
                self._publish_problem = published.reason
                if self._view is not None:
                    self._view = replace(self._view, version=published.version)
            finally:
                self._publishing = False
            self._show()

    async def _follow_operators(self) -> None:
        """Read the ledger after an operator's change while a step is computed; the main loop does so otherwise."""
        while True:
            await workflow.wait_condition(lambda: self._operator_changed and self._computing is not None)
            self._operator_changed = False
            try:
                await self._read_view()
            except ActivityError as error:
                self._show_store_problem(error)

    async def _ask_base(self) -> None:
        """Ask the base model the general questions once, beside other work; those it answers rightly become probes."""
        await workflow.wait_condition(self._base_unasked)
        try:
            await workflow.execute_activity_method(
                ProbeActivities.ask_general_questions,
                AskBase(policy=self._policy),
                summary="ask the base model the general questions",
                **ASK_BASE,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("the general questions cannot be asked: %s", _reason(error))
        self._base_awaited = True

    def _base_unasked(self) -> bool:
        return self._view is not None and self._view.general_unasked and not self._base_awaited

    async def _practise(self) -> None:
        """Practise lessons while engines have nothing else to do, and no step is computed that changes the policy."""
        last = workflow.now()
        while True:
            await workflow.wait_condition(self._may_practise)
            seconds, ended = self._state.practise_seconds, self._ended_step
            try:
                practised = await workflow.execute_activity_method(
                    PracticeActivities.practise,
                    Practise(policy=self._policy),
                    summary="practise lessons while the engines are idle",
                    **PRACTISE,
                )
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                workflow.logger.info("lessons are not practised now: %s", _reason(error))
            else:
                last = workflow.now() if practised.requests else last
                if not practised.more:
                    # Where one was found lately the next comes soon, and a pause between chats may be short.
                    rest = (workflow.now() - last).total_seconds() / 4
                    seconds = min(max(seconds, rest), self._state.rest_seconds)
            # A step that ends makes room for others.
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    partial(self._has_ended_a_step_since, ended), timeout=seconds, timeout_summary="practise again"
                )

    def _has_ended_a_step_since(self, n: int | None) -> bool:
        return self._ended_step != n

    def _may_practise(self) -> bool:
        view = self._view
        return (
            view is not None
            and view.practises
            and view.state is not TrainingState.PAUSED
            and view.closed_seconds is None
            and self._computing is None
        )

    # Continue as new -------------------------------------------------------------------------------------------------

    async def _roll_over(self, tasks: list[asyncio.Task[None]]) -> None:
        """Continue as new. The new run reads PostgreSQL and publishes first, so only the UI's texts are carried."""
        try:
            await workflow.wait_condition(lambda: not self._publishing, timeout=ROLL_OVER_WAIT)
        except TimeoutError:
            workflow.logger.info("publishing is left to the next run")
        for task in tasks:
            task.cancel()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self._state)

    # The UI ----------------------------------------------------------------------------------------------------------

    def _show_store_problem(self, error: ActivityError) -> None:
        self._store_problem = f"PostgreSQL call failed: {_reason(error)}"
        self._show()

    def _show(self) -> None:
        view = self._view
        notes = [note for note in (self._store_problem, self._publish_problem) if note]
        if self._state.operator_change:
            notes.append(f"last change by an operator: {self._state.operator_change}")
        headline = descriptions.training_headline(view, self._computing, self._computing_since, self._publishing, notes)
        table = descriptions.training_table(self._state.steps, None if view is None else view.version)
        workflow.set_current_details(f"{headline}\n\n{table}\n\n{NO_PAGE.of_training(self._policy)}")
        if view is None:
            return
        state = TrainingState.TRAINING if self._computing and view.state is TrainingState.WAITING else view.state
        if self._search_attributes != (state, view.version):
            self._search_attributes = (state, view.version)
            workflow.upsert_search_attributes([names.STATE.value_set(state), names.VERSION.value_set(view.version)])


def _reason(error: ActivityError) -> str:
    return reason_of(error)[:REASON_LIMIT]
