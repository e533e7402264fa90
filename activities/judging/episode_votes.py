"""The activity that judges an episode's turns one by one, where the recipe adds votes to the outcome.

A turn is judged by what followed it, as in a chat. The last one has no next state: the outcome closes it. Votes only
give the process term of the reward; the group's settlement decides the turns.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from temporalio import activity

from activities.judging.evaluation import Case, count_answers
from activities.judging.judge_turn import JudgementStore
from activities.judging.vote_collector import Judge, VoteCollector
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import EpisodeId, JudgementId, TurnId
from clawloop.core.judging.next_state_lookup import find_next_state
from clawloop.core.judging.voting import Verdict, majority

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class JudgeEpisode(Message):
    episode: EpisodeId


class EpisodeJudged(Message):
    """
    Args:
        turns: the episode's; judged: those with a valid vote.
    """

    turns: int
    judged: int


class EpisodeJudgingActivities:
    """Activities that have turns of episodes judged; on the queue `judge`.

    Args:
        waiting_turns: the episode's main turns that wait for its group, in their order. Raises StoreUnavailable.
        note_verdict: writes a verdict to a judgement that the group's settlement decides. Idempotent; nothing once it
            is decided. Raises StoreUnavailable.
        judge_learns: note where a gateway recorded its votes.
    """

    def __init__(
        self,
        store: JudgementStore,
        waiting_turns: Callable[[EpisodeId], Awaitable[list[TurnId]]],
        note_verdict: Callable[[JudgementId, Verdict], Awaitable[None]],
        judge: Judge,
        counts: WorkerMetrics | None = None,
        *,
        judge_learns: bool = False,
    ) -> None:
        self._judge_learns = judge_learns
        self._store = store
        self._waiting_turns = waiting_turns
        self._note_verdict = note_verdict
        self._judge = judge
        self._counts = counts

    @activity.defn
    async def judge_episode(self, request: JudgeEpisode) -> EpisodeJudged:
        """Ask for the votes on each turn of an episode that something followed; a retry asks only for missing ones."""
        async with heartbeating(lambda: "the judge votes"):
            turns = await self._waiting_turns(request.episode)
            judged = sum([await self._judge_turn(turn) for turn in turns])
        log.info("episode judged", extra={"episode": str(request.episode), "turns": judged, "of": len(turns)})
        return EpisodeJudged(turns=len(turns), judged=judged)

    async def _judge_turn(self, turn: TurnId) -> bool:
        """True if the turn has a valid vote."""
        context = await self._store.load_context(turn)
        if context is None or context.turn.outcome is not TurnOutcome.WAITING:
            return False
        state = await find_next_state(self._store.load_context, context)
        if state is None:
            return False
        case = Case(context, state)
        judgement = await self._store.open(*case.key)
        collector = VoteCollector(
            self._store,
            self._judge,
            case.record,
            case.evidence,
            judgement,
            None,
            notes_replies=self._judge_learns,
        )
        if await collector.votes_off():
            return False
        if await collector.has_direct_verdict():
            verdict = await collector.direct_vote()
            count_answers(self._counts, "vote", [verdict.verdict])
        else:
            votes = await collector.votes()
            verdict = majority(votes)
            count_answers(self._counts, "vote", votes)
        await self._note_verdict(judgement.id, verdict)
        return verdict.expected is not None
