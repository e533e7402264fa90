"""What a policy's training workflow remembers: its start argument, and its argument when it begins anew.

Knows nothing about Temporal's calls. Hardly anything: what it decides by, it asks Postgres.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from activities.training_messages import StepDone

STEPS_LIMIT = 20  # rows of the table in the UI


class PolicyTraining(BaseModel):
    """
    Args:
        steps: the newest ones, oldest first, for the UI.
        quiet_seconds: it looks at the ledger this often however quiet it is: an operator may have spoken while
            Temporal was away.
        roll_over_events: begin anew at this many events; None when Temporal suggests it.
    """

    model_config = ConfigDict(frozen=True)

    version: int = 1
    policy: str
    steps: list[StepDone] = []
    quiet_seconds: float = 3600.0
    roll_over_events: int | None = None
