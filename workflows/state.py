"""State of each workflow: its start argument, and its argument at continue-as-new.

Knows nothing about Temporal's calls. It stays far below 64 KiB whatever happens: what it forgets, Postgres knows,
and the closing looks there.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from activities.serving.messages import EngineHas
from activities.training.messages import StepDone
from clawloop.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
from clawloop.ids import SessionId, TurnId

KNOWN_LIMIT = 200  # ids of announced turns, to drop duplicates; an older one is judged once anyway, by its keys
CARRIED_LIMIT = 200  # messages that wait; what is beyond is found in Postgres when the session closes
ROWS_LIMIT = 20  # rows of the table in the UI


class SessionState(BaseModel):
    """
    Args:
        in_flight: how many turns are judged at once.
        roll_over_events: begin anew at this many events; None when Temporal suggests it.
        announced: main turns told of, in all runs since the session was opened.
        known: ids of the newest of them.
        carried: messages nobody took care of yet, oldest first.
        rows: the newest decided turns.
        adapter_version: of the newest turn.
        deadline: when it closes without a new turn; None in a first run.
        ends: the client said that its last turn was the last, or all its turns were erased.
        erased: they were, and no other has come.
        looked_into: it was begun for feedback or an operator, and no turn has come: it was closed before, and is closed
            again at once.
    """

    model_config = ConfigDict(frozen=True)

    version: int = 1
    session_id: SessionId
    policy: str
    idle_seconds: float
    adapter_version: int
    in_flight: int = 4
    roll_over_events: int | None = None
    announced: int = 0
    known: list[TurnId] = []
    carried: list[TurnRecorded | FeedbackGiven | RejudgeRequested] = []
    rows: list[TurnResult] = []
    deadline: datetime | None = None
    ends: bool = False
    erased: bool = False
    looked_into: bool = False


class SessionSummary(BaseModel):
    """What a closed session's workflow leaves behind."""

    model_config = ConfigDict(frozen=True)

    turns: int
    why: str
    guarantee: str


class EngineState(BaseModel):
    """What an engine's workflow remembers.

    Args:
        roll_over_events: begin anew at this many events; None when Temporal suggests it.
        has: how the engine was seen last; None: not yet.
        since: when it began to answer, or to be silent.
        wanted: it was told of a version it has not looked for yet.
    """

    model_config = ConfigDict(frozen=True)

    version: int = 1
    engine_id: str
    roll_over_events: int | None = None
    has: EngineHas | None = None
    since: datetime | None = None
    wanted: bool = False


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
