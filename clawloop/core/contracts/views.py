"""Sessions and turns as the page, the API and the command line show them. Unknown values are None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.sessions import FeedbackEffect, SessionState
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import MatchedBy, Message, TurnKind, TurnOutcome, TurnStatus
from clawloop.core.ids import ApiKeyId, EpisodeId, FeedbackId, LessonId, SampleId, SessionId, TurnId, response_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Filter of a list of sessions: it shows those with a turn that fits all conditions on turns.

    Args:
        text: in a message that the turn added, or in its reply; upper and lower case are the same.
        verdict: −1, 0 or 1 of the newest judgement.
        judged: False: the turn has no verdict.
        version: that answered.
        fold: leave out sessions without a main turn, and closed ones with a single one; not used where something is
            said of turns.
    """

    policy: str | None = None
    state: SessionState | None = None
    text: str | None = None
    kind: TurnKind | None = None
    outcome: TurnOutcome | None = None
    verdict: int | None = None
    judged: bool | None = None
    version: int | None = None
    fold: bool = False

    @property
    def of_turns(self) -> bool:
        """True if the filter has a condition on turns."""
        said = (self.text, self.kind, self.outcome, self.verdict, self.judged, self.version)
        return any(value is not None for value in said)


class View(BaseModel):
    """A view for people and programs, the same in REST, CLI and page."""

    model_config = ConfigDict(frozen=True)


class SessionView(View):
    """A session in a list.

    Args:
        short_id: the shortest beginning of `id` that no other session has; every route and command takes it.
        title: the beginning of what the user said first; None if nothing was said in words, or it was erased.
        erased: nothing is left of what was said.
        external_id: the client's own value; None if the client named none.
        waiting: number of its turns that wait.
        sampled: number of its turns that have a sample.
        closed_why: None if it was never closed.
        guarantee: what the at-least-one rule did at its first close.
        praised, blamed: numbers of its turns with the verdict 1 and −1.
        first_version, last_version: the lowest and the highest version that answered.
        task_outcome: 1 or −1; None if it was not reported.
        key_id: the key whose session it is.
        episode_id: None if that is not an episode's key.
        workflow_url: its workflow in Temporal's UI; None in lists, and if the UI's address is not known.
    """

    id: SessionId
    short_id: str
    policy: str
    title: str | None
    erased: bool
    external_id: str | None
    identified_by: str
    state: SessionState
    main_turns: int
    side_turns: int
    waiting: int
    sampled: int
    created_at: datetime
    last_turn_at: datetime
    closed_at: datetime | None
    closed_why: str | None
    guarantee: str | None
    praised: int
    blamed: int
    first_version: int
    last_version: int
    task_outcome: int | None
    key_id: ApiKeyId
    episode_id: EpisodeId | None
    workflow_url: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def workflow_id(self) -> str:
        """The session's workflow in Temporal."""
        return f"session/{self.id}"


class SessionPage(View):
    """
    Args:
        total: number of sessions that match, on all pages; None where they were searched for.
        folded: number of sessions that `fold` left out.
        next: the next page's `after`; None on the last page.
    """

    sessions: Sequence[SessionView]
    total: int | None
    folded: int
    next: SessionId | None


HintSource = Literal["judge", "message", "lessons"]
"""Who wrote a hint: a judge; the user, whose next message itself teaches; or the lessons of a practised request."""


class TaughtHint(View):
    """A hint of a turn, and its part in what the newest step that was given its sample learned.

    Args:
        overlap: mean share of the likeliest ids that the version that answered has in common with itself behind the
            hint; None where no step has compared them.
        distance: of what it makes the model say from the reply: mean KL in nats a token; None likewise.
        share: of the reply's tokens that this hint taught; None where no step has used the hints.
    """

    text: str
    source: HintSource = "judge"
    overlap: float | None = None
    distance: float | None = None
    share: float | None = None

    def line(self) -> str:
        """The hint with its part, e.g. `Be brief. (taught 100%, overlap 81%, distance 0.09)`."""
        figures = [] if self.share is None else [f"taught {self.share:.0%}"]
        figures += [] if self.overlap is None else [f"overlap {self.overlap:.0%}"]
        figures += [] if self.distance is None else [f"distance {self.distance:.2f}"]
        return f"{self.text} ({', '.join(figures)})" if figures else self.text

    @classmethod
    def of(cls, texts: str | None, source: HintSource, taught: Sequence[Mapping[str, Any]] | None) -> list[TaughtHint]:
        """
        Args:
            texts: the hints as a judgement stores them, one a line.
            taught: as `db.training.steps` stores it, by `HintUse.place`.
        """
        uses = {use["place"]: use for use in taught or ()}
        read = [(text, uses.get(place)) for place, text in enumerate([] if texts is None else texts.split("\n"))]
        unused = None if taught is None else 0.0
        return [
            cls(text=text, source=source, share=unused)
            if use is None
            else cls(text=text, source=source, overlap=use["overlap"], distance=use["distance"], share=use["share"])
            for text, use in read
        ]


class LessonShown(View):
    """A lesson that a turn's prompt held.

    Args:
        text: None once it was forgotten.
    """

    id: LessonId
    text: str | None

    @classmethod
    def of(cls, shown: Iterable[ShownLesson]) -> list[LessonShown]:
        return [cls(id=lesson.id, text=lesson.text or None) for lesson in shown]


class TurnView(View):
    """A turn with its outcome.

    Args:
        short_id: the shortest beginning of `id` that no other turn has; every route and command takes it.
        number: its position among the session's main turns, from 1; None for a side turn.
        matched_by: how the turn that it follows was found; None if it follows none.
        why: reason of its outcome, or what it waits for.
        votes: number of valid votes.
        step: the newest committed step that trained it; None if none did.
        tokens: of the reply; None if they are unknown.
        being_judged: a judge is at work on it.
        episode_id: the episode whose verifier decides its reward; None if it is a turn of a chat.
        lessons: those that its prompt held, in their order.
        workflow_url: its session's workflow in Temporal's UI; None in lists, and if the UI's address is not known.
    """

    id: TurnId
    short_id: str
    session_id: SessionId
    parent_turn_id: TurnId | None
    matched_by: MatchedBy | None = None
    number: int | None
    kind: TurnKind
    kind_reason: str
    status: TurnStatus
    error: str | None
    version: int
    outcome: TurnOutcome
    why: str
    verdict: int | None
    expected: float | None
    votes: int
    hints: Sequence[TaughtHint]
    sample: SampleState | None
    reward: float | None
    step: int | None
    tokens: int | None
    being_judged: bool
    episode_id: EpisodeId | None
    started_at: datetime
    announced_at: datetime | None
    lessons: Sequence[LessonShown] = ()
    workflow_url: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def response_id(self) -> str:
        """The `id` of the client's completion."""
        return response_id(self.id)


class VoteView(View):
    """One answer of a judge.

    Args:
        kind: `sampled`, or `direct` if the answer is the log-probs of the three choices.
        score: −1, 0 or 1; None if the answer cannot be read.
        answer: as it came.
    """

    kind: str
    index: int
    score: int | None
    answer: str


class HintView(View):
    """One answer of a judge about what the model should have known.

    Args:
        accepted: whether the judge found a hint; None if the answer cannot be read.
        answer: as it came.
    """

    kind: str
    index: int
    accepted: bool | None
    text: str | None
    answer: str


class FeedbackView(View):
    """A rating of a reply, a comment on it, or both.

    Args:
        score: −1 to 1; None for a comment alone.
        effect: what was known when it was given.
        applied: a judgement has taken it into account.
    """

    id: FeedbackId
    turn_id: TurnId
    score: float | None
    text: str | None
    effect: FeedbackEffect
    received_at: datetime
    applied: bool

    def comment_beside(self, hints: Sequence[TaughtHint]) -> str:
        """The comment; empty if there is none, or if one of these hints is made of the user's words and holds it."""
        words = " ".join((self.text or "").split())
        told = any(words in " ".join(hint.text.split()) for hint in hints if hint.source == "message")
        return "" if told else self.text or ""


class FeedbackList(View):
    feedback: Sequence[FeedbackView]


class Judged(View):
    """Verdict, votes, hints and feedback of a turn.

    Args:
        recipe: the name of the recipe of the newest decided judgement; None without one.
        revision: of that judgement: 0 is by the turn's next state.
        verdict_why: how the verdict was decided; None without one.
        hint_why: which hint was taken, or why no hint was.
        votes: of the newest decided judgement.
        hints: likewise.
        feedback: oldest first.
    """

    recipe: str | None = None
    revision: int | None = None
    verdict_why: str | None = None
    hint_why: str | None = None
    votes: Sequence[VoteView] = ()
    hints: Sequence[HintView] = ()
    feedback: Sequence[FeedbackView] = ()


class Exchange(View):
    """The messages and the reply that one turn added to its session, with its verdict.

    Args:
        said: the messages of its request after the reply that it continues.
        repeated: number of messages of the request before those in `said`.
        reply: None if the turn had no reply, or it was erased.
    """

    turn_id: TurnId
    said: Sequence[Message]
    repeated: int
    reply: Message | None
    judged: Judged


class SessionDetail(View):
    """A session with its turns.

    Args:
        turns: the newest ones, oldest first.
        earlier: `before` of the page with the turns before these; None if there are none.
        conversation: one entry for each of `turns`; None unless asked for.
    """

    session: SessionView
    turns: Sequence[TurnView]
    earlier: TurnId | None
    conversation: Sequence[Exchange] | None = None


class SampleView(View):
    """
    Args:
        reason: of its state.
        hinted: it has prompts with hints in them.
    """

    id: SampleId
    state: SampleState
    reason: str
    reward: float | None
    hinted: bool


class Tokens(View):
    """The ids that the engine used, and the log-probs of the response under the sampling settings, in nats.

    Args:
        advantages: of the response's tokens, as the newest step that was trained on them used them: above 0 a token
            was made likelier, below 0 less likely. None for a token that was not trained, and as a whole if no step
            used any.
        moves: by how much that step changed the log-prob of each token; None for a token that was not trained, and as a
            whole unless the step's recipe asked for it (`train.token_moves`).
        moves_seconds: how long that step read its batch once more for it.
        step: that step.
    """

    prompt_ids: Sequence[int] | None
    response_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    advantages: Sequence[float | None] | None = None
    moves: Sequence[float | None] | None = None
    moves_seconds: float | None = None
    step: int | None = None


class TurnDetail(View):
    """A turn with all that is stored of it.

    Args:
        asked_for: the model name that the client asked for.
        engine_id: None if no engine took the request.
        messages: of the request.
        sampling: every sampling field sent to the engine, with defaults.
        sample: of the newest decided judgement; None without one.
        tokens: None unless asked for.
    """

    turn: TurnView
    asked_for: str
    engine_id: str | None
    finish_reason: str | None
    finished_at: datetime
    messages: Sequence[Message]
    tools: Sequence[JsonValue] | None
    response: Message | None
    sampling: dict[str, JsonValue]
    judged: Judged
    sample: SampleView | None
    tokens: Tokens | None = None
