"""Names in Temporal: workflows, their ids, signals and updates, task queues, search attributes.

Open workflows and saved histories hold the values.
"""

from __future__ import annotations

from temporalio.common import SearchAttributeKey

from clawloop.core.ids import RolloutGroupId, SessionId

WORKFLOW_QUEUE = "clawloop"
LEDGER_QUEUE = "ledger"
JUDGE_QUEUE = "judge"
TRAINER_QUEUE_PREFIX = "trainer-"

SESSION_WORKFLOW = "Session"
TURN_RECORDED = "turn_recorded"
FEEDBACK_GIVEN = "feedback_given"
REJUDGE = "rejudge"
CONTENT_ERASED = "content_erased"
SWEEP_WORKFLOW = "Sweep"
SWEEP_ID = "sweep"
TRAINING_WORKFLOW = "Training"
WORK_WAITING = "work_waiting"
OPERATOR_CHANGED = "operator_changed"
ENGINE_WORKFLOW = "Engine"
PUBLISH = "publish"
ENGINE_REMOVED = "engine_removed"
ROLLOUT_GROUP_WORKFLOW = "RolloutGroup"
ROLLOUTS_WORKFLOW = "Rollouts"
ROLLOUTS_CHANGED = "rollouts_changed"

POLICY = SearchAttributeKey.for_keyword("ClawPolicy")
SESSION = SearchAttributeKey.for_keyword("ClawSession")
STATE = SearchAttributeKey.for_keyword("ClawState")
VERSION = SearchAttributeKey.for_int("ClawVersion")
ENGINE = SearchAttributeKey.for_keyword("ClawEngine")
SEARCH_ATTRIBUTES = (POLICY, SESSION, STATE, VERSION, ENGINE)


def session_workflow_id(session_id: SessionId) -> str:
    return f"session/{session_id}"


def training_workflow_id(policy: str) -> str:
    return f"training/{policy}"


def trainer_queue(pool: str) -> str:
    """The queue of a pool's trainers; each pool has one base model."""
    return f"{TRAINER_QUEUE_PREFIX}{pool}"


def engine_workflow_id(engine_id: str) -> str:
    return f"engine/{engine_id}"


def engine_of_workflow(workflow_id: str) -> str:
    """The engine id in the id of its workflow."""
    return workflow_id.removeprefix(engine_workflow_id(""))


def engine_queue(engine_id: str) -> str:
    return f"engine-{engine_id}"


def rollout_group_workflow_id(group: RolloutGroupId) -> str:
    return f"rollout-group/{group}"


def rollouts_workflow_id(policy: str) -> str:
    return f"rollouts/{policy}"
