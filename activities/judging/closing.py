"""Closing a session: each main turn gets an outcome and a reason, and the session at least one sample if possible.

The workflow repeats the closing step until nothing must be done first:

1. Judge what was missed. Waiting turns with a next state are returned to be judged; after `give_up` they become
   unjudged. Waiting turns without one have no feedback.
2. Finalize rewards that waited for the session's end: those of groups (the choices of one request with n > 1), and
   those by the outcome of the session's task (1: it succeeded, −1: it did not).
3. Find the fallback sample, if the session has no sample. Where all votes cancel out, its turns are returned for a
   direct vote each; after `asked_directly` those that are stored decide.
4. Close: the decisions, the fallback sample and the session's end are one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pydantic import Field
from temporalio import activity

from activities.judging.judge_turn import TRAINED_LIMIT, JudgementStore, main_turn_result, with_trained_turns
from activities.notify import TrainingNotifier
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.next_state_lookup import FoundState, look_for_next_state
from clawloop.core.judging.records import ClosingSession, SessionTurn, TurnDecision
from clawloop.core.judging.voting import direct_vote
from clawloop.core.samples.decision import FallbackSample, JudgedTurn, at_least_one

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

NOT_IN_HISTORY = "answer not in later history"
LOOKS_LIKE_CHORE = "looks like a summary request"
NEVER_JUDGED = "could not be judged before the session closed"
# The workflow judges them and closes again; a message of this many ids is small.
TO_JUDGE_LIMIT = 50


class CloseSession(Message):
    """
    Args:
        why: what closes the session, e.g. `idle for 30 min`.
        up_to: the newest turn the workflow knows; newer turns are left alone. None: no limit.
        give_up: turns that could be judged and were not become unjudged.
        asked_directly: direct votes were asked for; decide by those that are stored.
        tried_up_to: judging was tried for turns up to this one; newer ones are listed first.
        again: the session was closed before, and something came since, e.g. feedback. If it is open, do nothing.
    """

    session_id: SessionId
    why: str
    up_to: TurnId | None = None
    give_up: bool = False
    asked_directly: bool = False
    again: bool = False
    tried_up_to: TurnId | None = None


class Closed(Message):
    """The result of one closing step: the session is closed, or something must be done first.

    Args:
        to_judge: turns that have a next state and were never judged: judge them, then close.
        to_ask: turns whose votes cancel out: ask for a direct vote on each, then close.
        results: of the turns that the closing decided, and of the session's newest trained turns.
        guarantee: what the at-least-one rule gave; empty if this is not the first close.
        still_open: the session was to be closed again, but it is open: nothing was done.
    """

    to_judge: list[TurnId]
    results: list[TurnResult]
    guarantee: str = ""
    turns: int = 0
    to_ask: list[TurnId] = Field(default_factory=list)
    still_open: bool = False


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


class ClosingActivities:
    """Activities that close sessions in PostgreSQL; on the queue `ledger`. Short."""

    def __init__(
        self,
        store: ClosingStore,
        contexts: JudgementStore,
        training: TrainingNotifier,
        counts: WorkerMetrics | None = None,
    ) -> None:
        self._store = store
        self._counts = counts
        self._contexts = contexts
        self._training = training

    @activity.defn
    async def close_session(self, request: CloseSession) -> Closed:
        """Close a session; or return the turns that must be judged or voted on first."""
        async with heartbeating():
            return await self._close_session(request)

    async def _close_session(self, request: CloseSession) -> Closed:
        session = await self._store.load(request.session_id)
        if session is None:
            return Closed(to_judge=[], results=[], guarantee="no such session")
        if request.again and not session.closed:
            return Closed(to_judge=[], results=[], turns=session.main_turns, still_open=True)

        decisions, to_judge = await self._decide_waiting(session, request)
        if to_judge and not request.give_up:
            # A turn that cannot be judged must not keep those behind it from being tried.
            to_judge.sort(key=lambda turn_id: request.tried_up_to is not None and turn_id <= request.tried_up_to)
            return Closed(to_judge=to_judge[:TO_JUDGE_LIMIT], results=[], turns=session.main_turns)
        results = _results(session, decisions)

        if session.has_related_rewards:
            finalized, ready_policy = await self._store.finalize_related(request.session_id)
            await self._training.notify(ready_policy)
            session = await self._store.load(request.session_id) or session
            results += _results(session, finalized)

        fallback = _fallback_sample(session, asked_directly=request.asked_directly)
        if fallback is not None and fallback.ask:
            return Closed(to_judge=[], to_ask=list(fallback.ask[:TO_JUDGE_LIMIT]), results=[], turns=session.main_turns)
        if fallback is not None and fallback.turn_id is not None:
            results += _results(session, {fallback.turn_id: TurnDecision(TurnOutcome.SAMPLED, fallback.why)})

        # Before the session is closed: a retry after that finds no waiting turn to report.
        trained = await self._contexts.trained_turns(request.session_id, TRAINED_LIMIT)
        results = with_trained_turns(results, trained)
        ready_policy = await self._store.close(request.session_id, request.why, decisions, fallback)
        await self._training.notify(ready_policy)
        if self._counts is not None:
            self._counts.closed(guaranteed=fallback is not None and fallback.turn_id is not None)
        guarantee = "" if fallback is None else fallback.why
        return Closed(to_judge=[], results=results, guarantee=guarantee, turns=session.main_turns)

    async def _decide_waiting(
        self, session: ClosingSession, request: CloseSession
    ) -> tuple[dict[TurnId, TurnDecision], list[TurnId]]:
        """Decisions for the waiting turns that the workflow knows, and those of them that can be judged instead."""
        decisions: dict[TurnId, TurnDecision] = {}
        to_judge: list[TurnId] = []
        for turn in session.turns:
            if turn.outcome is not TurnOutcome.WAITING or (request.up_to is not None and turn.turn_id > request.up_to):
                continue
            found = await self._look(turn)
            if found.state is not None or (session.learns_by_outcome and turn.last and not turn.judged):
                to_judge.append(turn.turn_id)
                decisions[turn.turn_id] = TurnDecision(TurnOutcome.UNJUDGED, NEVER_JUDGED)
            else:
                why = f"nothing followed: {request.why}" if turn.last else NOT_IN_HISTORY
                why = LOOKS_LIKE_CHORE if found.withheld else why
                decisions[turn.turn_id] = TurnDecision(TurnOutcome.NO_FEEDBACK, why)
        return decisions, to_judge

    async def _look(self, turn: SessionTurn) -> FoundState:
        context = await self._contexts.load_context(turn.turn_id) if turn.followed_by else None
        return FoundState(None) if context is None else await look_for_next_state(self._contexts.load_context, context)


def _results(session: ClosingSession, decisions: Mapping[TurnId, TurnDecision]) -> list[TurnResult]:
    """Rows of the decided turns that `session` lists."""
    turns = {turn.turn_id: turn for turn in session.turns}
    return [
        main_turn_result(turn_id, turns[turn_id].number, decision.outcome, turns[turn_id].verdict, decision.why)
        for turn_id, decision in decisions.items()
        if turn_id in turns
    ]


def _fallback_sample(session: ClosingSession, *, asked_directly: bool) -> FallbackSample | None:
    """The at-least-one rule with the direct votes that are stored; None where it does not apply."""
    if not session.first_close or not session.at_least_one:
        return None
    judged = [turn for turn in session.turns if turn.judged and turn.outcome is not TurnOutcome.ERASED]
    fallback = _apply_rule(judged, {turn.turn_id: turn.expected for turn in judged})
    if not fallback.ask:
        return fallback
    by_direct_vote = {turn.turn_id: direct_vote(turn.direct).expected for turn in judged if turn.direct is not None}
    missing = tuple(turn_id for turn_id in fallback.ask if turn_id not in by_direct_vote)
    if missing and not asked_directly:
        return replace(fallback, ask=missing)
    if not by_direct_vote:
        return FallbackSample(None, None, (), "no sample: votes cancel out, and no direct vote was given")
    return _apply_rule(judged, by_direct_vote, direct=True)


def _apply_rule(
    turns: Sequence[SessionTurn], expected: Mapping[TurnId, float | None], *, direct: bool = False
) -> FallbackSample:
    judged = [
        JudgedTurn(turn.turn_id, expected.get(turn.turn_id), bool(turn.trainable), turn.samples > 0) for turn in turns
    ]
    return at_least_one(judged, direct=direct)
