"""Saved histories replay: a change of a workflow that open workflows could not follow fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from clawloop.app.temporal.plugin import ClawloopPlugin
from tests.replay.record import HISTORIES, PATHS
from workflows.registered import WORKFLOWS

SAVED = sorted(HISTORIES.glob("*.json"))


def replayer() -> Replayer:
    return Replayer(workflows=WORKFLOWS, plugins=[ClawloopPlugin(sandboxed=True)])


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.stem)
async def test_a_saved_history_replays(saved: Path) -> None:
    await replayer().replay_workflow(WorkflowHistory.from_json(f"saved/{saved.stem}", saved.read_text()))


def test_replays_run_in_the_sandbox() -> None:
    """It refuses clocks and random numbers, which a worker would not."""
    assert isinstance(replayer().config()["workflow_runner"], SandboxedWorkflowRunner)


def test_each_path_has_a_saved_history_and_each_history_its_path() -> None:
    assert {path.stem for path in SAVED} == PATHS.keys()


def test_each_workflow_has_a_saved_history() -> None:
    started = [json.loads((HISTORIES / f"{path}.json").read_text())["events"][0] for path in PATHS]
    types = {event["workflowExecutionStartedEventAttributes"]["workflowType"]["name"] for event in started}
    assert types == {workflow.__name__.removesuffix("Workflow") for workflow in WORKFLOWS}


@pytest.mark.parametrize("name", ["ended_by_the_client", "training_steps", "engine_publishes", "rollout_group_settled"])
async def test_a_history_that_our_workflow_would_not_have_written_fails(name: str) -> None:
    saved = json.loads((HISTORIES / f"{name}.json").read_text())
    for event in saved["events"]:
        scheduled = event.get("activityTaskScheduledEventAttributes")
        if scheduled:
            scheduled["activityType"]["name"] = "another_activity"
    result = await replayer().replay_workflow(
        WorkflowHistory.from_json("saved/changed", json.dumps(saved)), raise_on_replay_failure=False
    )
    assert "another_activity" in str(result.replay_failure)
