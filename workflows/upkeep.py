"""The sweep, begun by a schedule every minute."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.messages import Swept
    from activities.upkeep import UpkeepActivities
    from workflows import attributes
    from workflows.policies import SWEEP


@workflow.defn(name=attributes.SWEEP_WORKFLOW)
class SweepWorkflow:
    @workflow.run
    async def run(self) -> Swept:
        return await workflow.execute_activity_method(
            UpkeepActivities.sweep, summary="announce what was missed, wake sessions left open", **SWEEP
        )
