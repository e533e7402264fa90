"""What the activities need from outside, as they would like to be told it.

Knows nothing about who answers. Every store call raises StoreUnavailable when PostgreSQL does not answer in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.sessions import FeedbackGiven, SessionFacts, TurnRecorded
from clawloop.contracts.turns import Message, TurnOutcome, TurnRecord
from clawloop.ids import FeedbackId, JudgementId, SessionId, TurnId
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt
from clawloop.judging.records import (
    ClosingSession,
    Ending,
    ExtraSample,
    FinalizedJudgement,
    GivenFeedback,
    OpenJudgement,
    TrainedTurn,
    TurnContext,
)
from clawloop.samples.rewards import MemberResult


class TurnContextStore(Protocol):
    async def place(self, turn_id: TurnId) -> TurnContext | None:
        """A main turn with what is around it; None if there is none of that id, or it is a side turn."""

    async def trained(self, session: SessionId, limit: int) -> list[TrainedTurn]:
        """The session's newest `limit` main turns that were trained, rolled back since or not, in their order."""


class JudgementStore(TurnContextStore, Protocol):
    """Where judgements are kept, each answer of a judge once."""

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's judgement of revision 0: made now under its policy's recipe, or gone on with."""

    async def revise(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's newest judgement to amend; a further revision once a step has taken its sample."""

    async def rejudge(
        self, turn_id: TurnId, revision: int, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's judgement of this revision: made now under its policy's recipe, or gone on with."""

    async def store_vote(self, judgement: JudgementId, index: int, raw: str, vote: Vote | None) -> None:
        """Keep one answer for good; the first one counts, and none once the judgement is decided."""

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> Mapping[Vote, float]:
        """Keep a direct vote, its log-probs as they came, for good; the first one counts, and is returned."""

    async def store_hint(
        self, judgement: JudgementId, kind: str, index: int, raw: str, hint: HintVote | None
    ) -> None: ...

    async def finalize(self, judgement: JudgementId, end: FinalizedJudgement, heard: list[FeedbackId]) -> str | None:
        """Verdict, hint, sample and the turn's outcome in one transaction; feedback `heard` is taken into it.

        Samples of the turn's other judgements that no step has taken are superseded. Where a step has taken one, only
        new feedback makes a further sample: without any, the judgement is not held and the turn stays as it is.

        Returns:
            The policy that has a batch waiting since this call; None if it has none, or had one before.

        Raises:
            RecordUnusable: the turn was erased meanwhile.
            StoreUnavailable: also when feedback it has not heard of was taken in meanwhile: that is not undone. And
                when the stored votes are not those it was decided by: whoever tries again reads them.
        """

    async def feedback_of(self, turn_id: TurnId) -> list[GivenFeedback]:
        """All feedback on a turn, oldest first."""


class Judge(Protocol):
    @property
    def form(self) -> AnswerForm:
        """How this judge can be made to answer."""

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[str]:
        """At most `n` answers to one question, in one request.

        Raises:
            JudgeUnavailable: ask again later.
            JudgeRefused: it will never take this question.
        """

    async def distribution(self, policy: str, prompt: JudgePrompt) -> Mapping[Vote, float]:
        """Log-probs of the three votes, as the first token of a bare answer at temperature 1.

        Raises:
            JudgeUnavailable: ask again later.
            JudgeRefused: it will never take this question, writes free answers, or does not report log-probs.
        """


class Renderer(Protocol):
    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt with these messages, otherwise as the turn's, by the engine's own template.

        Raises:
            EngineUnavailable: ask again later.
            EngineRejected: the engine cannot render these.
            PromptTooLong: they and the turn's reply do not fit into its context.
        """


class Counts(Protocol):
    """What is told how much was done; never raises."""

    def answered(self, kind: str, valid: int, missing: int) -> None:
        """A judgement has this many valid answers of this kind (`vote`, `hint`) and lacks that many."""

    def judged(self, outcome: TurnOutcome) -> None: ...

    def closed(self, guaranteed: bool) -> None:
        """A session was closed; `guaranteed`: the at-least-one rule gave it a sample."""

    def swept(self, turns: int, feedback: int, sessions: int, stuck: int) -> None:
        """A sweep announced these turns and feedback, and woke these sessions; `stuck` could not be told."""


class Uncounted:
    """Counts nothing."""

    def answered(self, kind: str, valid: int, missing: int) -> None:
        pass

    def judged(self, outcome: TurnOutcome) -> None:
        pass

    def closed(self, guaranteed: bool) -> None:
        pass

    def swept(self, turns: int, feedback: int, sessions: int, stuck: int) -> None:
        pass


class ClosingStore(Protocol):
    async def look(self, session: SessionId) -> ClosingSession | None:
        """What a closing must decide; None if there is no such session."""

    async def finalize_related(self, session: SessionId) -> tuple[list[MemberResult], str | None]:
        """Settle groups and outcome of a session that closes: what is not known by now will not be.

        Returns:
            What became of their members, and the policy that has a batch waiting since this call.
        """

    async def close(
        self, session: SessionId, why: str, endings: Sequence[Ending], guarantee: str | None, extra: ExtraSample | None
    ) -> str | None:
        """End undecided turns and the session in one transaction. Turns decided meanwhile stay as they are.

        Returns:
            The policy that has a batch waiting since this call; None if it has none, or had one before.
        """


class UpkeepStore(Protocol):
    async def pending_turns(
        self, age: timedelta, limit: int, but: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, TurnRecorded]]:
        """Main turns older than `age` whose workflow was not told, in the order in which they were made; none of the
        sessions in `but`."""

    async def pending_feedback(
        self, age: timedelta, limit: int, but: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, FeedbackGiven]]:
        """Feedback older than `age` whose workflow was not told, or that was told a day ago and forgotten; none of the
        sessions in `but`."""

    async def sessions_left_open(self, age: timedelta, limit: int) -> list[SessionFacts]:
        """Sessions without a turn for longer than `age` that nobody closed, oldest first."""

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None: ...

    async def mark_feedback_notified(self, feedback_ids: Sequence[FeedbackId]) -> None: ...


class SessionNotifier(Protocol):
    """What tells sessions' workflows. Every call raises SignalFailed when it cannot."""

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None: ...

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None: ...

    async def wake(self, session: SessionFacts) -> None:
        """See that the session's workflow runs, so that it closes."""
