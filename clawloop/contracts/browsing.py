"""Sessions, replies and versions with what was said, as the page shows them. Unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import JsonValue

from clawloop.contracts.serving import ApiKey
from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import Message, TurnKind, TurnOutcome, TurnStatus
from clawloop.contracts.views import SessionView
from clawloop.ids import ApiKeyId, SampleId, SessionId, TurnId


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A valid key, and the SHA-256 of its secret, from which logins with it are signed."""

    key: ApiKey
    secret_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Filter of a list of sessions: it shows those with a turn that fits every field that is not None.

    Args:
        text: in a message that the turn added, or in its reply; upper and lower case are the same.
        verdict: −1, 0 or 1 of the newest judgement.
        judged: False: the turn has no verdict.
        version: the version that answered.
    """

    policy: str | None = None
    state: SessionState | None = None
    text: str | None = None
    kind: TurnKind | None = None
    outcome: TurnOutcome | None = None
    verdict: int | None = None
    judged: bool | None = None
    version: int | None = None

    @property
    def of_turns(self) -> bool:
        """True if the filter has a condition on turns."""
        said = (self.text, self.kind, self.outcome, self.verdict, self.judged, self.version)
        return any(value is not None for value in said)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session in a list.

    Args:
        opening: the messages of its first main turn that the turn added; empty if they were erased.
        praised, blamed: numbers of its turns with the verdict 1 and −1.
        versions: the first and the last version that answered.
        task_outcome: 1 or −1; None if it was not reported.
    """

    view: SessionView
    opening: Sequence[Message]
    praised: int
    blamed: int
    versions: tuple[int, int]
    task_outcome: int | None


@dataclass(frozen=True, slots=True)
class JudgeVote:
    """One answer of a judge, as it came.

    Args:
        kind: `sampled` or `direct`.
        score: None: the answer could not be read.
    """

    kind: str
    raw: str
    score: int | None


@dataclass(frozen=True, slots=True)
class JudgeHint:
    """One answer of a judge about a hint.

    Args:
        accepted: the judge says there is a hint; None: the answer could not be read.
    """

    raw: str
    accepted: bool | None
    text: str | None


@dataclass(frozen=True, slots=True)
class GivenRating:
    """Feedback on a turn."""

    score: float | None
    text: str | None
    effect: str
    received_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgementView:
    """A turn's newest decided judgement with the judges' own words.

    Args:
        expected: mean of the votes.
        reward: of its sample; None without one.
        sample: None if it made none.
    """

    revision: int
    verdict: int | None
    verdict_why: str | None
    expected: float | None
    hint: str | None
    hint_why: str | None
    why: str | None
    recipe: str
    decided_at: datetime
    sample: SampleState | None
    reward: float | None
    votes: Sequence[JudgeVote] = ()
    hints: Sequence[JudgeHint] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A turn as a part of a chat.

    Args:
        number: position among the session's main turns, from 1; None for a side turn.
        kept: how many messages of its request are the parent's conversation.
        added: the messages after those.
        tokens: of the reply.
        step: the newest committed step that trained it.
        open_judgement: a judge is at work on it.
        in_episode: an environment's verifier decides its reward.
    """

    id: TurnId
    session_id: SessionId
    parent: TurnId | None
    number: int | None
    kind: TurnKind
    kind_reason: str
    status: TurnStatus
    error: str | None
    version: int
    outcome: TurnOutcome
    why: str | None
    kept: int
    added: Sequence[Message]
    response: Message | None
    tokens: int | None
    started_at: datetime
    finished_at: datetime
    step: int | None
    open_judgement: bool
    judgement: JudgementView | None
    ratings: Sequence[GivenRating] = ()
    in_episode: bool = False


@dataclass(frozen=True, slots=True)
class ChatPage:
    """A part of a session.

    Args:
        total: all turns of the session.
        first: the position of the first turn here, from 0.
        owner: the key whose session it is.
        in_episode: that is an episode's key.
    """

    summary: SessionSummary
    owner: ApiKeyId
    turns: Sequence[ChatTurn]
    total: int
    first: int
    in_episode: bool = False


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
