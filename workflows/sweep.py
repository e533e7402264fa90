"""The sweep; a schedule starts it every minute."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.sweep import SweepActivities, Swept
    from workflows import names
    from workflows.activity_options import SWEEP


@workflow.defn(name=names.SWEEP_WORKFLOW)
class SweepWorkflow:
    @workflow.run
    async def run(self) -> Swept:
        return await workflow.execute_activity_method(
            SweepActivities.sweep, summary="send missed signals, wake sessions left open", **SWEEP
        )
