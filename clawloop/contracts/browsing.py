"""Keys, batches, events and figures of a policy, as the page shows them. Unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import JsonValue

from clawloop.contracts.serving import ApiKey
from clawloop.contracts.turns import Message
from clawloop.ids import SampleId, SessionId, TurnId


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A valid key, and the SHA-256 of its secret, from which logins with it are signed."""

    key: ApiKey
    secret_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    """A sample of a step's batch with the reply it is about.

    Args:
        dropped: why the step left it out; None if it was trained.
        without_hint: why only its verdict was trained.
    """

    sample_id: SampleId
    turn_id: TurnId
    session_id: SessionId
    number: int
    answered_by: int
    added: Sequence[Message]
    response: Message | None
    verdict: int | None
    reward: float | None
    hint: str | None
    dropped: str | None
    without_hint: str | None


MEASURED = "version_measured"
"""The kind of an event that tells a version's match in an evaluation."""


@dataclass(frozen=True, slots=True)
class PolicyEvent:
    """Something that an operator or Clawloop did to a policy."""

    kind: str
    detail: Mapping[str, JsonValue]
    at: datetime


@dataclass(frozen=True, slots=True)
class ReplyFigures:
    """A main turn on the chart.

    Args:
        tokens: of the reply.
    """

    at: datetime
    version: int
    verdict: int | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a policy's sessions, turns and quarantined samples.

    Args:
        outcomes: number of turns by outcome; the newest 100,000 turns are counted.
        quarantined: samples that only a resume with them takes again.
    """

    sessions: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
