"""Saved histories replay: a change of a workflow that open sessions could not follow fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from clawloop.temporal.plugin import ClawloopPlugin
from tests.replay import engine_paths, rollout_paths, training_paths
from tests.replay.record import HISTORIES, PATHS
from workflows import names
from workflows.engine import EngineWorkflow
from workflows.rollout_group import RolloutGroupWorkflow
from workflows.rollouts import RolloutsWorkflow
from workflows.session import SessionWorkflow
from workflows.training import TrainingWorkflow

SAVED = sorted(HISTORIES.glob("*.json"))


def replayer() -> Replayer:
    workflows = [SessionWorkflow, TrainingWorkflow, EngineWorkflow, RolloutsWorkflow, RolloutGroupWorkflow]
    return Replayer(workflows=workflows, plugins=[ClawloopPlugin(sandboxed=True)])


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.stem)
async def test_a_saved_history_replays(saved: Path) -> None:
    await replayer().replay_workflow(WorkflowHistory.from_json(f"session/{saved.stem}", saved.read_text()))


def test_replays_run_in_the_sandbox() -> None:
    """It refuses clocks and random numbers, which a worker would not."""
    assert isinstance(replayer().config()["workflow_runner"], SandboxedWorkflowRunner)


def test_every_path_is_saved() -> None:
    paths = (*PATHS, *training_paths.PATHS, *engine_paths.PATHS, *rollout_paths.PATHS)
    assert {path.__name__ for path in paths} <= {path.stem for path in SAVED}


def test_each_former_update_is_in_a_saved_history() -> None:
    """Recording a path anew must not lose the updates that open workflows of version 0.1.0 hold."""
    named = {
        event["workflowExecutionUpdateAcceptedEventAttributes"]["acceptedRequest"]["input"]["name"]
        for path in SAVED
        for event in json.loads(path.read_text())["events"]
        if "workflowExecutionUpdateAcceptedEventAttributes" in event
    }
    assert named == {"pause", "resume", "roll_back", "pin", "set_recipe", names.OPERATOR_CHANGED}


@pytest.mark.parametrize("name", ["ended_by_the_client", "training_steps", "engine_publishes", "rollout_group_settled"])
async def test_a_history_that_our_workflow_would_not_have_written_fails(name: str) -> None:
    saved = json.loads((HISTORIES / f"{name}.json").read_text())
    for event in saved["events"]:
        scheduled = event.get("activityTaskScheduledEventAttributes")
        if scheduled:
            scheduled["activityType"]["name"] = "another_activity"
    result = await replayer().replay_workflow(
        WorkflowHistory.from_json("session/changed", json.dumps(saved)), raise_on_replay_failure=False
    )
    assert "another_activity" in str(result.replay_failure)
