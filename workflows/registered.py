"""All workflows: what the orchestrator runs, and what histories are replayed with."""

from __future__ import annotations

from workflows.engine import EngineWorkflow
from workflows.rollouts import RolloutGroupWorkflow, RolloutsWorkflow
from workflows.session import SessionWorkflow
from workflows.sweep import SweepWorkflow
from workflows.training import TrainingWorkflow

WORKFLOWS = (
    SessionWorkflow,
    SweepWorkflow,
    TrainingWorkflow,
    EngineWorkflow,
    RolloutsWorkflow,
    RolloutGroupWorkflow,
)
