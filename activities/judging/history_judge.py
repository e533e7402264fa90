"""Judges a stored turn once more without storing anything; satisfies `clawloop.operations.history.HistoryJudge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from activities.judging.evaluation import Case
from activities.judging.judge_turn import JudgementStore
from activities.judging.vote_collector import Judge, VoteCollector
from clawloop.core.ids import JudgementId, TurnId, new_judgement_id
from clawloop.core.judging.next_state_lookup import find_next_state
from clawloop.core.judging.prompts import JudgeReply
from clawloop.core.judging.records import OpenJudgement, StoredAnswers, StoredHint, StoredVote
from clawloop.core.judging.voting import Verdict, Vote, majority
from clawloop.core.recipes.recipe import Recipe


class StoredTurnJudge:
    """Asks a judge for its votes on stored turns."""

    def __init__(self, store: JudgementStore, judge: Judge) -> None:
        self._store = store
        self._judge = judge

    async def verdict(self, turn_id: TurnId, recipe: Recipe) -> Verdict | None:
        """The verdict by what followed the turn and what users wrote about it; None if there is neither any more.

        Raises:
            JudgeUnavailable: retry later.
        """
        context = await self._store.load_context(turn_id)
        if context is None or context.turn.record.response is None:
            return None
        case = Case(context, await find_next_state(self._store.load_context, context))
        if case.next_state is None and not case.texts:
            return None
        judgement = OpenJudgement(new_judgement_id(), recipe, {}, {})
        collector = VoteCollector(_Forgetful(), self._judge, case.record, case.evidence, judgement, None)
        if await collector.has_direct_verdict():
            found = await collector.direct_vote()
        else:
            found = majority(await collector.votes())
        problems = "; ".join(collector.problems)
        why = f"{found.why} ({problems})" if problems else found.why
        return Verdict(found.verdict, found.expected, found.reward, why)


class _Forgetful:
    """Satisfies `activities.judging.vote_collector.AnswerStore` and keeps nothing."""

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        return StoredAnswers()

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> StoredAnswers:
        return StoredAnswers()

    async def store_hints(self, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]) -> StoredAnswers:
        return StoredAnswers()
