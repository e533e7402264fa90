"""Protocols of what the judging activities need from outside.

Every store call raises StoreUnavailable when PostgreSQL does not answer in time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.ids import FeedbackId, JudgementId, SessionId, TurnId
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt, JudgeReply
from clawloop.core.judging.records import (
    ClosingSession,
    FinalizedJudgement,
    JudgingContext,
    OpenJudgement,
    StoredAnswers,
    StoredHint,
    StoredVote,
    TurnContext,
    TurnDecision,
)
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import JudgeForm
from clawloop.core.samples.decision import FallbackSample


class AnswerStore(Protocol):
    """Stores each answer of a judge once.

    Each call that stores answers, also one that has none, returns what is stored afterwards, read in its transaction:
    another worker may have asked the same meanwhile.
    """

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        """Insert votes in one transaction. Idempotent: the first of an index counts, and none after the decision.

        Args:
            replies: by index, where the gateway that the judge was asked through recorded the vote, for a judge that
                learns. Only that of a vote which is inserted is stored, with it: another worker's is another reply.
        """

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> StoredAnswers:
        """Insert a direct vote with its log-probs as they came; the first one counts."""

    async def store_hints(self, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]) -> StoredAnswers:
        """Insert hints in one transaction. Idempotent: the first of a kind and index counts."""


class JudgementStore(AnswerStore, Protocol):
    """Stores judgements, and each answer of a judge once."""

    async def load_context(self, turn_id: TurnId) -> TurnContext | None:
        """A main turn, its neighbours and feedback; None for an unknown turn or a side turn."""

    async def trained_turns(self, session: SessionId, limit: int) -> list[TurnResult]:
        """The session's newest `limit` main turns that were trained, rolled back since or not, in their order."""

    async def load_judging(self, turn_id: TurnId, trained_limit: int) -> JudgingContext | None:
        """The contexts of a turn and of the one it follows, and `trained_turns`, in one transaction; None as there."""

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str, revision: int = 0
    ) -> OpenJudgement:
        """The turn's judgement of this revision: continued, or made now under its policy's recipe.

        Raises:
            RecordUnusable: the policy has no recipe, or the turn or the one that holds its next state was erased.
        """

    async def revise(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's newest judgement, to be amended; a further revision if a step has taken its sample.

        Raises:
            RecordUnusable: the policy has no recipe, or the turn or the one that holds its next state was erased.
        """

    async def finalize(
        self, judgement: JudgementId, finalized: FinalizedJudgement, feedback_ids: Sequence[FeedbackId]
    ) -> str | None:
        """Write verdict, hint, sample and the turn's outcome in one transaction; mark the feedback as applied.

        Samples of the turn's other judgements that no step has taken are superseded. If a step has taken one, only
        new feedback makes a further sample: without any, nothing is written and the turn stays as it is.

        Args:
            feedback_ids: the feedback that `finalized` takes into account.

        Returns:
            The policy's id if its batch became ready with this call; None if no batch is ready, or one was before.

        Raises:
            RecordUnusable: the turn, or the one that holds its next state, was erased.
            StoreUnavailable: also when the decision is outdated. A step took the sample that was to be amended (then
                `revise` makes another judgement); feedback not in `feedback_ids` was applied (a judge's late answer
                must not undo it); or the stored votes are not those of the ballot (a retry reads them).
        """


class Judge(Protocol):
    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        """How the judge of a policy answers sampled votes and hints.

        Args:
            wanted: the recipe's `signal.judge_form`.

        Raises:
            JudgeUnavailable: retry later.
        """

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        """At most `n` answers to one question, in one request.

        Raises:
            JudgeUnavailable: retry later.
            JudgeRefused: the judge will never take this question.
        """

    async def distribution(self, policy: str, prompt: JudgePrompt) -> Mapping[Vote, float]:
        """Log-probs of the three votes, as the first token of a bare answer at temperature 1.

        Raises:
            JudgeUnavailable: retry later.
            JudgeRefused: the judge will never take this question, always thinks first, has no grammar, or reports no
                log-probs.
        """


Render = Callable[[TurnRecord, Sequence[Message]], Awaitable[list[int]]]
"""The prompt ids of these messages with the turn's tools and options, by the engine's own template.

Raises:
    EngineUnavailable: retry later.
    EngineRejected: the engine cannot render the messages.
    PromptTooLong: the messages and the turn's reply do not fit into the engine's context.
"""


class ClosingStore(Protocol):
    async def load(self, session: SessionId) -> ClosingSession | None:
        """The session and the turns a closing decides; None if there is no such session."""

    async def finalize_related(self, session: SessionId) -> tuple[dict[TurnId, TurnDecision], str | None]:
        """Finalize the rewards that waited for the session's end: of its groups, and by its task's outcome.

        Returns:
            The decisions, and the policy's id if its batch became ready with this call.
        """

    async def close(
        self,
        session: SessionId,
        why: str,
        decisions: Mapping[TurnId, TurnDecision],
        fallback: FallbackSample | None = None,
    ) -> str | None:
        """Write the decisions, the fallback sample and the session's end in one transaction.

        Turns decided meanwhile keep their outcome. A session that is closed, and has no turn since, keeps the time and
        reason of its close.

        Args:
            decisions: for turns that nobody judged.
            fallback: what the at-least-one rule gave; None if it does not apply. A stored guarantee stays.

        Returns:
            The policy's id if its batch became ready with this call; None if no batch is ready, or one was before.
        """
