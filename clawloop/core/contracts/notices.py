"""Messages that cross Temporal to workflows, notices among them, and the port that sends notices. Ids and reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from clawloop.core.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.core.contracts.training import OperatorChange
from clawloop.core.ids import SessionId

# Messages -------------------------------------------------------------------------------------------------------------
# The base of what crosses Temporal between workflows and activities: ids, scores and reasons, never text.
#
# Open workflows and saved histories hold messages. After a release their fields keep their names, and a new field is
# optional.


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)


# Notices --------------------------------------------------------------------------------------------------------------
# What workflows are notified of, and the port that notifies them. Ids and reasons, never text of a conversation.
#
# PostgreSQL has what a notice is about before it is sent, and the workflow decides by that. So each notice is
# idempotent and best effort: the sweep repeats one that was not sent, or the workflow looks again by itself.


@dataclass(frozen=True, slots=True)
class SessionNotice:
    """A session has a new turn, feedback or request. Starts the session's workflow if it does not run.

    Args:
        message: None: nothing came; the workflow runs, so that the session closes.
    """

    session: SessionFacts
    message: TurnRecorded | FeedbackGiven | RejudgeRequested | None


@dataclass(frozen=True, slots=True)
class SessionErased:
    """Content of a session was erased. Starts no workflow: PostgreSQL has no text for it."""

    session: SessionId
    erased: ContentErased


@dataclass(frozen=True, slots=True)
class BatchWaits:
    """A policy has a batch to train, or a version to publish. Starts its training workflow if it does not run."""

    policy: str


@dataclass(frozen=True, slots=True)
class OperatorChanged:
    """An operator changed something about a policy's training. Starts no workflow, and needs a worker that runs it."""

    policy: str
    change: OperatorChange


@dataclass(frozen=True, slots=True)
class RolloutsChanged:
    """A policy's rollouts may start groups, or were paused. Starts their workflow if it does not run."""

    policy: str


@dataclass(frozen=True, slots=True)
class EngineAdded:
    """An engine is served from now on. Starts its workflow if it does not run."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class VersionToLoad:
    """There is a version that an engine should load. Starts its workflow if it does not run."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """An engine is not served any more. Ends its workflow if it runs."""

    engine_id: str


Notice = (
    SessionNotice
    | SessionErased
    | BatchWaits
    | OperatorChanged
    | RolloutsChanged
    | EngineAdded
    | VersionToLoad
    | EngineRemoved
)


class Notifier(Protocol):
    async def notify(self, notice: Notice) -> None:
        """Notify a workflow, within 3 s.

        Raises:
            SignalFailed: Temporal does not answer in time, or refuses.
        """
