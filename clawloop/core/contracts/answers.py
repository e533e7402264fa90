"""Answers of the API and of `--json` about training, policies, engines, keys, events and operators' changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic import JsonValue

from clawloop.core.contracts.episodes import EpisodeView, GroupView
from clawloop.core.contracts.lessons import Finding, LessonSource, LessonState
from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.contracts.sessions import Erasure
from clawloop.core.contracts.training import StepProgress, StoredProbe, TrainingState, TrainingView, VersionView
from clawloop.core.contracts.turns import Message
from clawloop.core.contracts.views import FeedbackView, TaughtHint, View
from clawloop.core.ids import ApiKeyId, EpisodeId, LessonId, RolloutGroupId, SampleId, SessionId, TurnId

if TYPE_CHECKING:
    from clawloop.core.judging.progress import Progress

# Keys, batches and events ---------------------------------------------------------------------------------------------
# Keys, batches, events and figures of a policy, as the page shows them. Unknown values are None.


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A valid key, and the SHA-256 of its secret, from which logins with it are signed."""

    key: ApiKey
    secret_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    """A sample of a step's batch with the reply it is about.

    Args:
        reaction: what followed the reply and was judged; empty if only feedback was, or it was erased.
        feedback: on the reply, oldest first.
        tokens: of the reply.
        dropped: why the step left it out; None if it was trained.
        without_hint: why only its verdict was trained.
        practice_of: the turn of the conversation whose request was answered again without lessons, whose `number` this
            is; None: the reply is that of the conversation.
    """

    sample_id: SampleId
    turn_id: TurnId
    session_id: SessionId
    number: int
    answered_by: int
    added: Sequence[Message]
    response: Message | None
    reaction: Sequence[Message]
    feedback: Sequence[FeedbackView]
    tokens: int
    verdict: int | None
    reward: float | None
    hints: Sequence[TaughtHint]
    dropped: str | None
    without_hint: str | None
    practice_of: TurnId | None = None


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
        in_episode: an environment's verifier, not the user, decides what it is worth.
    """

    at: datetime
    session_id: SessionId
    in_episode: bool
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


# Answers --------------------------------------------------------------------------------------------------------------
# Answers of the API and of `--json` about training, policies, engines, keys and operators' changes.


class TrainingStatus(View):
    """
    Args:
        reason: what training waits for, or why it is paused; for people.
        ready: fresh samples.
        needed: a full batch.
        judging: turns that wait for their next state or their judge.
        step: the step that is computed, or that comes next.
        version: the version that answers.
        head: the newest trained one on the current path.
        pinned: the version that answers whatever is trained; None if none.
        closed_seconds: the recipe's schedule lets no batch be claimed for this long; None if one may be claimed.
        progress: what is done with the open step or the newest version: `now`, as of a few seconds ago, and `seconds`
            since the attempt began; None: nothing.
    """

    policy: str
    state: TrainingState
    reason: str
    ready: int
    needed: int
    judging: int
    step: int
    version: int
    head: int
    pinned: int | None
    closed_seconds: float | None = None
    progress: StepProgress | None = None

    @property
    def is_done(self) -> bool:
        """Every turn is judged, every full batch is trained, and the newest version answers."""
        nothing_to_learn = self.state is TrainingState.WAITING and self.ready < self.needed
        return self.judging == 0 and nothing_to_learn and self.version == self.head

    @classmethod
    def of(cls, view: TrainingView) -> TrainingStatus:
        return cls(**{name: getattr(view, name) for name in cls.model_fields})


class Liked(View):
    """Whether the trained versions' replies are liked better than version 0's were, see `core.judging.progress`.

    Args:
        better: the interval is above 0, or below; None: that is not known.
        chats, base_chats: judged chats with trained versions, and with version 0.
        share, base_share: of good verdicts, 0 to 1; None without a judged chat.
        low, high: 95 % interval of the change of the share; None with too few chats of either.
    """

    policy: str
    better: bool | None
    chats: int
    base_chats: int
    share: float | None
    base_share: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, policy: str, progress: Progress) -> Liked:
        return cls(policy=policy, better=progress.is_better, **asdict(progress))


class PolicyStatus(View):
    """
    Args:
        base_model: the name under which engines serve version 0.
        aliases: further names of the policy.
    """

    policy: str
    base_model: str
    aliases: Sequence[str]
    training: TrainingStatus


class PolicyList(View):
    policies: Sequence[PolicyStatus]


class VersionList(View):
    versions: Sequence[VersionView]


class VersionDetail(View):
    """
    Args:
        children: the versions made from it.
        batch: the replies that its step was trained on; empty for version 0.
    """

    version: VersionView
    children: Sequence[int]
    batch: Sequence[TrainedReply]


class EngineStatus(View):
    """
    Args:
        healthy: it answers.
        draining: it gets no new requests.
        versions: loaded adapter versions by policy; every engine has version 0.
        problem: why its agent took it out of rotation; None: it works, or has no agent.
    """

    id: str
    url: str
    healthy: bool
    draining: bool
    versions: dict[str, list[int]]
    problem: str | None


class EngineList(View):
    engines: Sequence[EngineStatus]


class ServiceStatus(View):
    """
    Args:
        engines_answering: those that answer and are not drained.
        newest_turn_at: None before the first turn.
        waiting: turns that wait for a reaction or a verdict.
        problems: what is wrong, for people.
        temporal_ui: address of Temporal's UI; None if it is not known.
        workflows: links into it by workflow, of each policy's training and of each engine.
    """

    engines: int
    engines_answering: int
    policies: Sequence[TrainingStatus]
    sessions: int
    open_sessions: int
    newest_turn_at: datetime | None
    waiting: int
    problems: Sequence[str]
    temporal_ui: str | None = None
    workflows: Mapping[str, str] = {}


class EngineAdded(View):
    """
    Args:
        warnings: what was found when it was asked, for people.
    """

    engine: EngineStatus
    warnings: Sequence[str]


class KeyView(View):
    """A key, without its secret.

    Args:
        prefix: its public part.
        policies: what a header may choose besides `policy`; `*`: any.
        revoked_at: None if it was not revoked.
        expires_at: None if it does not expire.
    """

    id: ApiKeyId
    name: str
    prefix: str
    policy: str
    policies: Sequence[str]
    scopes: Sequence[Scope]
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None = None


class KeyList(View):
    keys: Sequence[KeyView]


class NewKey(View):
    """
    Args:
        key: with its secret, which is stored nowhere.
        policies: what a header may choose besides `policy`; `*`: any.
        expires_at: None if it does not expire.
    """

    key: str
    prefix: str
    policy: str
    policies: Sequence[str]
    name: str
    scopes: Sequence[Scope]
    expires_at: datetime | None = None


class KeyRevoked(View):
    prefix: str


class GroupPage(View):
    """
    Args:
        next: the next page's `after`; None on the last page.
    """

    groups: Sequence[GroupView]
    next: RolloutGroupId | None


class EpisodePage(View):
    """
    Args:
        next: the next page's `after`; None on the last page.
    """

    episodes: Sequence[EpisodeView]
    next: EpisodeId | None


class EventList(View):
    events: Sequence[PolicyEvent]


class VersionAnswer(View):
    """
    Args:
        text: None if it did not answer; `problem` says why.
    """

    version: int
    text: str | None
    problem: str | None = None


class ComparedPrompt(View):
    """One prompt, and the answers of the other version and of the version."""

    prompt: str
    answers: Sequence[VersionAnswer]


class Comparison(View):
    """
    Args:
        parent: of the version, with which it was compared unless another one was named; None of version 0.
    """

    version: int
    parent: int | None
    prompts: Sequence[ComparedPrompt]


class Probe(View):
    """A probe as it is stored; without any check the judge compares the answers to it.

    Args:
        general: one of Clawloop's general questions, which the base model knows.
    """

    id: UUID
    general: bool
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    contains: Sequence[str]
    regex: str | None
    exact: str | None
    created_at: datetime

    @classmethod
    def of(cls, stored: StoredProbe) -> Probe:
        content = stored.content
        return cls(
            id=stored.id,
            general=stored.general,
            messages=[dict(message) for message in content.messages],
            tools=None if content.tools is None else [dict(tool) for tool in content.tools],
            contains=list(content.contains),
            regex=content.regex,
            exact=content.exact,
            created_at=stored.created_at,
        )


class ProbeList(View):
    probes: Sequence[Probe]


class YardstickView(View):
    """What a lesson did when it was new, and what later versions lack of that without it.

    Args:
        finding: `not_measured`, `no_effect`, `has_effect`, `not_learned`, `learned` or `grown`.
        replies: by how many it is measured.
        version: in which it was new; None: not measured.
        effect, low, high: nats a reply by which it made replies likelier, and the interval of 95 %.
        left: by version, the share of this effect that the version lacks without the lesson.
        summary: all of it in words; empty while no reply is measured.
    """

    finding: Finding
    replies: int
    version: int | None
    effect: float | None
    low: float | None
    high: float | None
    left: Mapping[int, float]
    summary: str


class LessonLearned(View):
    """
    Args:
        versions: those that learned from samples which a lesson taught, or came after one that did: what they learned
            stays when it is forgotten.
        roll_back_to: the newest version before these whose files are kept, or the base model; None: there are none.
    """

    versions: Sequence[int]
    roll_back_to: int | None

    def what_is_left(self, policy: str) -> str:
        """Which versions have what the lesson taught, and what to do about it; empty where none has."""
        if self.roll_back_to is None:
            return ""
        first, last = self.versions[0], self.versions[-1]
        named = f"Version {first} has" if first == last else f"Versions {first} to {last} have"
        return (
            f"{named} learned from it: `clawloop policy roll-back {self.roll_back_to} --policy {policy}` goes back to"
            " before, and a lesson that says the opposite is practised instead."
        )


class LessonView(LessonLearned):
    """A lesson that is not erased.

    Args:
        why: the reason of its state.
        in_prompt: a session that starts now gets it.
        turns: how many turns were answered with it.
        practised: how many requests were answered again without it, to be learned from with it.
        since_version: of a learned lesson, the first version that had learned it; else the version that answered when
            its state last changed.
        yardstick: what is measured of its effect.
        turn_id: the turn that was corrected; None if a person typed the lesson.
        said_in: the turn whose request holds the correction; None: a comment does, or there is none.
    """

    id: LessonId
    short_id: str
    text: str
    state: LessonState
    why: str
    in_prompt: bool
    source: LessonSource
    turns: int
    practised: int
    since_version: int
    yardstick: YardstickView | None
    turn_id: TurnId | None
    said_in: TurnId | None
    session_id: SessionId | None
    superseded_by: LessonId | None
    created_at: datetime
    changed_at: datetime


class LessonList(View):
    """
    Args:
        enabled: the recipe has prompts hold lessons.
        max_tokens: of all lessons in a prompt.
        left_out: active lessons that do not fit into it beside newer ones.
    """

    policy: str
    enabled: bool
    max_tokens: int
    left_out: int
    lessons: Sequence[LessonView]


class LessonForgotten(LessonLearned):
    """
    Args:
        turns: turns that were answered with it; the tokens of their prompts are gone with it.
    """

    id: LessonId
    turns: int


class ContentGone(View):
    """
    Args:
        turns: how many were erased now, their practice not counted; 0 if all were before.
        samples_expired: samples that waited for a step and were expired.
        samples_learned: samples that steps have trained, or are training: these stay in their versions.
        workflow_told: false while Temporal is away: its table shows the turns as they were.
    """

    session_id: SessionId
    turns: int
    samples_expired: int
    samples_learned: int
    workflow_told: bool

    @classmethod
    def of(cls, erasure: Erasure, *, workflow_told: bool) -> ContentGone:
        return cls(
            session_id=erasure.session.session_id,
            turns=erasure.turns,
            samples_expired=erasure.expired,
            samples_learned=erasure.learned,
            workflow_told=workflow_told,
        )


class Rejudged(View):
    """
    Args:
        revision: of the judgement that was asked for; asked for again before it exists, it is the same.
        refused: why the turn cannot be judged again; None: its workflow judges it.
    """

    turn_id: TurnId
    session_id: SessionId
    revision: int
    refused: str | None


class RejudgeList(View):
    turns: Sequence[Rejudged]


class EpisodeSecret(View):
    """The key of an episode, for its agent."""

    key: str


class ArtifactStored(View):
    """
    Args:
        digest: by which it is read again: its SHA-256, or where content is encrypted a keyed one.
    """

    digest: str


class Broken(View):
    """A row that breaks an invariant."""

    invariant: str
    row: str


class CheckReport(View):
    """
    Args:
        invariants: how many were checked.
        adapters: how many adapters' files were compared with their hash.
    """

    invariants: int
    adapters: int
    violations: Sequence[Broken]
