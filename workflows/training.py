"""Learning of one policy, for as long as it lives: batch after batch becomes a step, each step a version.

It only says what comes next. All it decides by is in Postgres, which operators write before they tell it; so it may
be ended at any point and begun anew, and what was said while Temporal was away holds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.serving.messages import PublishVersion
    from activities.serving.publishing import PublishingActivities
    from activities.training.messages import (
        REASON_LIMIT,
        AbandonStep,
        ClaimBatch,
        PauseTraining,
        Pin,
        QuarantineStep,
        ResumeTraining,
        RollBack,
        SetRecipe,
        StepDone,
        TrainStep,
    )
    from activities.training.steps import StepActivities
    from activities.training.train_step import TrainingActivities
    from clawloop.contracts.training import Claim, StepState, TrainingState, TrainingView
    from workflows import descriptions, names
    from workflows.policies import PUBLISH, STORE, train_on
    from workflows.reasons import reason_of
    from workflows.state import STEPS_LIMIT, PolicyTraining

# Publishing that takes longer than this is begun anew by the next run; engines keep what they have loaded.
ROLL_OVER_WAIT = timedelta(minutes=2)
# What the ledger says of a step that was rolled away under the trainer.
GONE = "RecordUnusable"


@workflow.defn(name=names.TRAINING_WORKFLOW)
class TrainingWorkflow:
    @workflow.init
    def __init__(self, state: PolicyTraining) -> None:
        self._state = state
        self._policy = state.policy
        self._steps: list[StepDone] = list(state.steps)
        self._look: TrainingView | None = None
        self._work_waits = False
        self._operator_spoke = False
        # After a start engines may lack what the ledger wants.
        self._unpublished = True
        self._publishing = False
        self._computing: Claim | None = None
        self._ended_step: int | None = None
        self._since: datetime = workflow.now()
        self._refused = ""  # why the ledger could not be asked
        self._held_back = ""  # why the newest version does not answer
        self._found_by: tuple[str, int] | None = None
        self._bug: BaseException | None = None

    @workflow.run
    async def run(self, state: PolicyTraining) -> None:
        beside = [asyncio.create_task(self._publish_versions()), asyncio.create_task(self._follow_operators())]
        for task in beside:
            task.add_done_callback(self._ended)
        while True:
            if self._must_roll_over():
                await self._roll_over(beside)
            self._work_waits = self._operator_spoke = False
            try:
                look = await self._look_around()
                learned = await self._learn(look)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                self._refused = f"the ledger refuses: {_reason(error)}"
                learned = False
                self._tell()
            if not learned:
                await self._wait()

    # What operators and samples say; the row in Postgres is the truth, these only wake --------------------------------

    @workflow.signal(name=names.WORK_WAITING)
    def work_waiting(self) -> None:
        self._work_waits = True

    @workflow.update(name=names.PAUSE)
    def pause(self, said: PauseTraining) -> None:
        self._operator_spoke = True

    @pause.validator
    def _check_pause(self, said: PauseTraining) -> None:
        if not said.reason.strip():
            raise ValueError("a pause says why: reason")

    @workflow.update(name=names.RESUME)
    def resume(self, said: ResumeTraining) -> None:
        self._operator_spoke = True

    @workflow.update(name=names.ROLL_BACK)
    def roll_back(self, said: RollBack) -> None:
        self._operator_spoke = self._unpublished = True

    @roll_back.validator
    def _check_roll_back(self, said: RollBack) -> None:
        _check_version(said.version)

    @workflow.update(name=names.PIN)
    def pin(self, said: Pin) -> None:
        self._operator_spoke = self._unpublished = True

    @pin.validator
    def _check_pin(self, said: Pin) -> None:
        _check_version(said.version)

    @workflow.update(name=names.SET_RECIPE)
    def set_recipe(self, said: SetRecipe) -> None:
        self._operator_spoke = True

    # Learning --------------------------------------------------------------------------------------------------------

    async def _learn(self, look: TrainingView) -> bool:
        """One step, if there is a batch for it."""
        if look.state is TrainingState.PAUSED and look.step_state is StepState.CLAIMED:
            return False
        claimed = await workflow.execute_activity_method(
            StepActivities.claim_batch,
            ClaimBatch(policy=self._policy, n=look.step),
            summary=f"a batch for step {look.step}",
            **STORE,
        )
        if claimed.state is None:
            return False
        if claimed.n == self._ended_step:
            # Numbers are never used again. Should the ledger say otherwise, wait rather than spin.
            self._refused = f"step {claimed.n} has ended, and the ledger names it again"
            self._tell()
            return False
        if claimed.state is StepState.CLAIMED:
            await self._step(look, claimed)
        self._ended_step = claimed.n
        return True

    async def _step(self, look: TrainingView, claimed: Claim) -> None:
        self._computing, self._since = claimed, workflow.now()
        self._tell()
        try:
            done = await self._compute(look, claimed)
        finally:
            self._computing = None
        if done.state is StepState.QUARANTINED:
            await workflow.execute_activity_method(
                StepActivities.quarantine_step,
                QuarantineStep(policy=self._policy, n=done.n, reason=done.reason),
                summary=f"set the samples of step {done.n} aside, and pause: {done.reason}",
                **STORE,
            )
        elif done.state is StepState.COMMITTED:
            self._unpublished = True
        self._steps = [*self._steps, done][-STEPS_LIMIT:]

    async def _compute(self, look: TrainingView, claimed: Claim) -> StepDone:
        try:
            return await workflow.execute_activity_method(
                TrainingActivities.train_step,
                TrainStep(policy=self._policy, n=claimed.n),
                summary=descriptions.step_summary(look, claimed),
                **train_on(look.pool),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise  # somebody cancelled the workflow, which says nothing about the batch
            reason = _reason(error)
            if _kind(error) == GONE:
                await workflow.execute_activity_method(
                    StepActivities.abandon_step,
                    AbandonStep(policy=self._policy, n=claimed.n, reason=reason),
                    summary=f"give step {claimed.n} up: {reason}",
                    **STORE,
                )
                state = StepState.ABANDONED
            else:
                state = StepState.QUARANTINED
            return StepDone(policy=self._policy, n=claimed.n, state=state, samples=claimed.samples, reason=reason)

    async def _look_around(self) -> TrainingView:
        self._look = await workflow.execute_activity_method(
            StepActivities.look_at_training, self._policy, summary="how learning stands", **STORE
        )
        if self._look.unpublished and not self._publishing:
            self._unpublished = True
        self._refused = ""
        self._tell()
        return self._look

    async def _wait(self) -> None:
        seconds, why = self._state.quiet_seconds, "look again however quiet it is"
        look = self._look
        if look is not None and look.oldest_seconds is not None and look.max_wait_seconds is not None:
            left = max(look.max_wait_seconds - look.oldest_seconds, 1.0)
            if look.state is not TrainingState.PAUSED and left < seconds:
                seconds, why = left, "the oldest sample has waited long enough"
        try:
            await workflow.wait_condition(self._has_something_to_do, timeout=seconds, timeout_summary=why)
        except TimeoutError:
            return
        if self._bug is not None:
            raise self._bug  # the workflow waits here until we have mended it

    def _has_something_to_do(self) -> bool:
        return self._work_waits or self._operator_spoke or self._must_roll_over() or self._bug is not None

    # Beside it -------------------------------------------------------------------------------------------------------

    async def _publish_versions(self) -> None:
        """Give engines the newest version; what is trained meanwhile goes with the next."""
        while True:
            await workflow.wait_condition(lambda: self._unpublished)
            self._unpublished, self._publishing = False, True
            self._tell()
            try:
                published = await workflow.execute_activity_method(
                    PublishingActivities.publish_version,
                    PublishVersion(policy=self._policy),
                    summary="let the newest version answer",
                    **PUBLISH,
                )
            except ActivityError as error:
                self._held_back = f"not published: {_reason(error)}"
            else:
                self._held_back = published.reason
                if self._look is not None:
                    self._look = replace(self._look, version=published.version)
            finally:
                self._publishing = False
            self._tell()

    async def _follow_operators(self) -> None:
        """While a step is computed, look when an operator has spoken; otherwise the story itself does."""
        while True:
            await workflow.wait_condition(lambda: self._operator_spoke and self._computing is not None)
            self._operator_spoke = False
            try:
                await self._look_around()
            except ActivityError as error:
                self._refused = f"the ledger refuses: {_reason(error)}"
                self._tell()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    # Beginning anew --------------------------------------------------------------------------------------------------

    def _must_roll_over(self) -> bool:
        limit = self._state.roll_over_events
        if limit is not None:
            return workflow.info().get_current_history_length() >= limit
        return workflow.info().is_continue_as_new_suggested()

    async def _roll_over(self, beside: list[asyncio.Task[None]]) -> None:
        """Begin a new run, which looks around and publishes first of all; so nothing but the table is carried."""
        try:
            await workflow.wait_condition(lambda: not self._publishing, timeout=ROLL_OVER_WAIT)
        except TimeoutError:
            workflow.logger.info("a publishing is left to the next run")
        for task in beside:
            task.cancel()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self._state.model_copy(update={"steps": self._steps}))

    # The UI ----------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        look = self._look
        problems = [why for why in (self._refused, self._held_back) if why]
        line = descriptions.training_headline(look, self._computing, self._since, self._publishing, problems)
        workflow.set_current_details(
            f"{line}\n\n{descriptions.training_table(self._steps, None if look is None else look.version)}"
        )
        if look is None:
            return
        state = TrainingState.TRAINING if self._computing and look.state is TrainingState.WAITING else look.state
        if self._found_by != (state, look.version):
            self._found_by = (state, look.version)
            workflow.upsert_search_attributes([names.STATE.value_set(state), names.VERSION.value_set(look.version)])


def _check_version(version: int | None) -> None:
    if version is not None and version < 0:
        raise ValueError("a version is 0, the base model, or the number of a step")


def _kind(error: ActivityError) -> str | None:
    return error.cause.type if isinstance(error.cause, ApplicationError) else None


def _reason(error: ActivityError) -> str:
    return reason_of(error)[:REASON_LIMIT]
