"""Rollouts of one policy: keeps as many groups in flight as PostgreSQL says, until they are paused."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ChildWorkflowError, WorkflowAlreadyStartedError, is_cancelled_exception
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from activities.episodes import EpisodeLedgerActivities
    from clawloop.ids import RolloutGroupId
    from workflows import names
    from workflows.ledger_call import call_ledger
    from workflows.long_running import LongRunningWorkflow, reason_of
    from workflows.rollout_group import RolloutGroupWorkflow
    from workflows.state import PolicyRollouts

# A group that ends elsewhere, a step that makes room, a pause that was said while Temporal was away.
LOOK_AGAIN = timedelta(seconds=15)


@workflow.defn(name=names.ROLLOUTS_WORKFLOW)
class RolloutsWorkflow(LongRunningWorkflow):
    @workflow.init
    def __init__(self, state: PolicyRollouts) -> None:
        super().__init__(state.roll_over_events)
        self._policy = state.policy
        self._changed = False
        self._waiting: set[RolloutGroupId] = set()

    @workflow.run
    async def run(self, state: PolicyRollouts) -> None:
        while not self._must_roll_over():
            self._changed = False
            try:
                found = await call_ledger(EpisodeLedgerActivities.next_groups, self._policy, "which groups to start")
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                workflow.set_current_details(f"PostgreSQL call failed: {reason_of(error)}")
            else:
                workflow.set_current_details(f"{len(found.open)} groups in flight; {found.reason}")
                if not found.running and not found.open:
                    return  # `clawloop rollouts start` starts this workflow again
                # All that are open, so that those of an earlier run of this workflow are found as well.
                for group in found.open:
                    if group not in self._waiting:
                        self._waiting.add(group)
                        self._start(self._run_group(group))
            try:
                await workflow.wait_condition(lambda: self._changed or self._bug is not None, timeout=LOOK_AGAIN)
            except TimeoutError:
                continue
            self._raise_bug()
        workflow.continue_as_new(state)

    @workflow.signal(name=names.ROLLOUTS_CHANGED)
    def rollouts_changed(self) -> None:
        self._changed = True

    async def _run_group(self, group: RolloutGroupId) -> None:
        try:
            await workflow.execute_child_workflow(
                RolloutGroupWorkflow.run,
                group,
                id=names.rollout_group_workflow_id(group),
                parent_close_policy=ParentClosePolicy.ABANDON,
                static_summary=f"{self._policy}: a rollout group",
            )
        except WorkflowAlreadyStartedError:
            pass  # an earlier run of this workflow started it
        except ChildWorkflowError as error:
            workflow.logger.warning("rollout group failed: %s", type(error.cause).__name__)
        else:
            self._changed = True
        # While the ledger says that the group is open, it is tried again: after a pause, for what fails at once would
        # be tried again at once, without end.
        self._waiting.discard(group)
