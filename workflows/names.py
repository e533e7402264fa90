"""Names under which our workflows are found in Temporal: ids, queues, search attributes.

Knows nothing about clients. Names are kept: open workflows and saved histories hold them.
"""

from __future__ import annotations

from temporalio.common import SearchAttributeKey

from clawloop.ids import SessionId

WORKFLOW_QUEUE = "clawloop"
LEDGER_QUEUE = "ledger"
JUDGE_QUEUE = "judge"
TRAINER_QUEUE_PREFIX = "trainer-"

SESSION_WORKFLOW = "Session"
TURN_RECORDED = "turn_recorded"
FEEDBACK_GIVEN = "feedback_given"
JUDGE_AGAIN = "judge_again"
CONTENT_ERASED = "content_erased"
CLOSES_AGAIN, ENDS_BY_NEWEST = "closes-again", "ends-by-newest"  # patches of the session's workflow
SWEEP_WORKFLOW = "Sweep"
SWEEP_ID = "sweep"
TRAINING_WORKFLOW = "Training"
WORK_WAITING = "work_waiting"
PAUSE = "pause"
RESUME = "resume"
ROLL_BACK = "roll_back"
PIN = "pin"
SET_RECIPE = "set_recipe"
ENGINE_WORKFLOW = "Engine"
PUBLISH = "publish"
ENGINE_REMOVED = "engine_removed"

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
    """Where the trainers of a pool look for steps; each pool serves one base model."""
    return f"{TRAINER_QUEUE_PREFIX}{pool}"


def engine_workflow_id(engine_id: str) -> str:
    return f"engine/{engine_id}"


def engine_of_workflow(workflow_id: str) -> str:
    """The engine whose workflow has this id."""
    return workflow_id.removeprefix(engine_workflow_id(""))


def engine_queue(engine_id: str) -> str:
    return f"engine-{engine_id}"
