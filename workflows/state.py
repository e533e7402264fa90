"""State of each workflow: its start argument, and its argument at continue-as-new.

The workflow changes it in place. Durable: open workflows and saved histories hold it; later fields are optional. It
stays far below 64 KiB: what is dropped here is in PostgreSQL, and the closing reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from activities.serving.engines import EngineReport
from activities.training.train_step import StepDone
from clawloop.core.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
from clawloop.core.ids import SessionId, TurnId

KNOWN_LIMIT = 200  # turn ids kept to drop duplicate signals; for an older duplicate the stored judgement is found
# Unhandled messages kept at continue-as-new, which waits while there are more, but not without limit.
INBOX_LIMIT = 200
ROWS_LIMIT = 20  # rows of the table in the UI


class SessionState(BaseModel):
    """
    Args:
        adapter_version: of the newest turn.
        in_flight: how many turns are judged at once.
        roll_over_events: continue as new at this many events; None: when Temporal suggests it.
        turns: number of main turns signalled since the session was opened, in all runs.
        known: ids of the newest of these turns.
        carried: the inbox: messages not handled yet, oldest first; kept at continue-as-new.
        rows: the newest decided turns.
        deadline: when the session closes without a new turn; None before the first run.
        ends: the client marked its newest turn as the last, or all turns were erased.
        erased: all turns were erased, and no other has come.
        closes_again: the session was closed before, and this run was started by feedback or an operator, not by a turn:
            it judges what was asked for and closes again at once.
    """

    session_id: SessionId
    policy: str
    idle_seconds: float
    adapter_version: int
    in_flight: int = 4
    roll_over_events: int | None = None
    turns: int = 0
    known: list[TurnId] = []
    carried: list[TurnRecorded | FeedbackGiven | RejudgeRequested] = []
    rows: list[TurnResult] = []
    deadline: datetime | None = None
    ends: bool = False
    erased: bool = False
    closes_again: bool = False


def kept_for_next_run(
    messages: Sequence[TurnRecorded | FeedbackGiven | RejudgeRequested],
) -> list[TurnRecorded | FeedbackGiven | RejudgeRequested]:
    """The messages that the next run takes over, oldest first: of more than INBOX_LIMIT not the oldest turns.

    The closing reads these turns in PostgreSQL. Feedback and an operator's requests would be signalled again late.
    """
    surplus = len(messages) - INBOX_LIMIT
    kept = []
    for message in messages:
        if surplus > 0 and isinstance(message, TurnRecorded):
            surplus -= 1
        else:
            kept.append(message)
    return kept[-INBOX_LIMIT:]


class SessionSummary(BaseModel):
    """The result of a session's workflow."""

    model_config = ConfigDict(frozen=True)

    turns: int
    why: str
    guarantee: str


class EngineState(BaseModel):
    """
    Args:
        roll_over_events: continue as new at this many events; None: when Temporal suggests it.
        has: the state the agent reported last; None: none yet.
        since: when the engine became healthy or unhealthy.
        wanted: there are versions to load, and no load has started for them.
    """

    engine_id: str
    roll_over_events: int | None = None
    has: EngineReport | None = None
    since: datetime | None = None
    wanted: bool = False


class PolicyRollouts(BaseModel):
    """
    Args:
        roll_over_events: continue as new at this many events; None: when Temporal suggests it.
    """

    policy: str
    roll_over_events: int | None = None


STEPS_LIMIT = 20  # rows of the table in the UI


class PolicyTraining(BaseModel):
    """
    Args:
        steps: the newest ones, oldest first, for the UI.
        quiet_seconds: the ledger is read at least this often: an operator may have changed it while Temporal was away.
        practise_seconds: after so long an engine that was used, or did not answer, is looked at again.
        rest_seconds: likewise at most, where nothing was left to practise; after a quarter of the time since a request
            was practised, but not before `practise_seconds`.
        roll_over_events: continue as new at this many events; None: when Temporal suggests it.
        operator_change: the newest one, for the UI.
    """

    policy: str
    steps: list[StepDone] = []
    quiet_seconds: float = 3600.0
    practise_seconds: float = 60.0
    rest_seconds: float = 600.0
    roll_over_events: int | None = None
    operator_change: str = ""
