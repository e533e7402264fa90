"""Closing a session: every main turn gets an outcome and a reason, and the session at least one sample if it can.

Knows nothing about judges: what could still be judged is said to the workflow first.
"""

from __future__ import annotations

from dataclasses import replace

from temporalio import activity

from activities.judging.messages import WHY_LIMIT, Closed, CloseSession, TurnResult
from activities.judging.next_state_lookup import find_next_state
from activities.judging.ports import ClosingStore, Counts, TurnContextStore, Uncounted
from activities.judging.turn_results import with_trained_turns
from activities.training.notifier import TrainingNotifier
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import TurnId
from clawloop.judging.records import ClosingSession, Ending, ExtraSample, SessionTurn
from clawloop.judging.voting import direct_vote
from clawloop.samples.assembly import FallbackSample, JudgedTurn, at_least_one
from clawloop.samples.rewards import MemberResult

ELSEWHERE = "answer not in later history"
NEVER_JUDGED = "could not be judged before the session closed"
# The workflow judges them and comes again; a message of this many ids is small.
TO_JUDGE_LIMIT = 50


class LedgerActivities:
    """On the queue `ledger`: short, PostgreSQL only."""

    def __init__(
        self, store: ClosingStore, places: TurnContextStore, work: TrainingNotifier, counts: Counts | None = None
    ) -> None:
        self._store = store
        self._counts: Counts = counts or Uncounted()
        self._places = places
        self._work = work

    @activity.defn(name="close_session")
    async def close_session(self, ask: CloseSession) -> Closed:
        """End a session, unless turns of it can still be judged: then say which, and change nothing."""
        session = await self._store.look(ask.session_id)
        if session is None:
            return Closed(to_judge=[], fates=[], guarantee="no such session")
        if ask.again and not session.closed:
            return Closed(to_judge=[], fates=[], turns=session.main_turns, still_open=True)
        undecided = [turn for turn in session.turns if _is_undecided(turn, ask.up_to)]
        ends: list[tuple[SessionTurn, Ending]] = []
        to_judge: list[TurnId] = []
        for turn in undecided:
            if await self._has_next_state(turn) or (session.by_outcome and turn.last and not turn.judged):
                to_judge.append(turn.turn_id)
                ends.append((turn, Ending(turn.turn_id, TurnOutcome.UNJUDGED, NEVER_JUDGED)))
            else:
                why = f"nothing followed: {ask.why}" if turn.last else ELSEWHERE
                ends.append((turn, Ending(turn.turn_id, TurnOutcome.NO_FEEDBACK, why)))
        if to_judge and not ask.give_up:
            # What cannot be judged must not keep those behind it from being tried.
            to_judge.sort(key=lambda turn_id: ask.tried_up_to is not None and turn_id <= ask.tried_up_to)
            return Closed(to_judge=to_judge[:TO_JUDGE_LIMIT], fates=[], turns=session.main_turns)
        finalized: list[MemberResult] = []
        if session.related:
            finalized, ready = await self._store.finalize_related(ask.session_id)
            await self._work.tell(ready)
            session = await self._store.look(ask.session_id) or session
        found = _at_least_one(session, asked_directly=ask.asked_directly)
        if found is not None and found.ask:
            return Closed(to_judge=[], to_ask=list(found.ask[:TO_JUDGE_LIMIT]), fates=[], turns=session.main_turns)
        guarantee, extra = _guarantee(found)
        fates = [_turn_result(turn, end.outcome, end.why) for turn, end in ends]
        by_id = {turn.turn_id: turn for turn in session.turns}
        fates += [_turn_result(by_id[end.turn_id], end.outcome, end.why) for end in finalized if end.turn_id in by_id]
        if extra is not None:
            fates += [_turn_result(by_id[extra.turn_id], TurnOutcome.SAMPLED, extra.why)]
        # Before it is closed: an attempt that came after that would find nothing left to tell.
        fates = await with_trained_turns(self._places, ask.session_id, fates)
        ready = await self._store.close(ask.session_id, ask.why, [end for _, end in ends], guarantee, extra)
        await self._work.tell(ready)
        self._counts.closed(guaranteed=extra is not None)
        return Closed(to_judge=[], fates=fates, guarantee=guarantee or "", turns=session.main_turns)

    async def _has_next_state(self, turn: SessionTurn) -> bool:
        if not turn.followed_by:
            return False
        placed = await self._places.place(turn.turn_id)
        return placed is not None and await find_next_state(self._places, placed) is not None


def _is_undecided(turn: SessionTurn, up_to: TurnId | None) -> bool:
    return turn.outcome is TurnOutcome.WAITING and (up_to is None or turn.turn_id <= up_to)


def _at_least_one(session: ClosingSession, *, asked_directly: bool) -> FallbackSample | None:
    """What the rule says, with the direct votes there are; None where it does not apply."""
    if not session.first or not session.at_least_one:
        return None
    judged = [turn for turn in session.turns if turn.judged and turn.outcome is not TurnOutcome.ERASED]
    found = at_least_one([_seen(turn, turn.expected) for turn in judged])
    if not found.ask:
        return found
    known = {turn.turn_id: direct_vote(turn.direct).expected for turn in judged if turn.direct is not None}
    missing = tuple(turn_id for turn_id in found.ask if turn_id not in known)
    if missing and not asked_directly:
        return replace(found, ask=missing)
    if not known:
        return FallbackSample(None, None, (), "no sample: votes cancel out, and no direct vote was given")
    return at_least_one([_seen(turn, known.get(turn.turn_id)) for turn in judged], direct=True)


def _seen(turn: SessionTurn, expected: float | None) -> JudgedTurn:
    return JudgedTurn(turn.turn_id, expected, bool(turn.trainable), turn.samples > 0)


def _guarantee(found: FallbackSample | None) -> tuple[str | None, ExtraSample | None]:
    """For the session, and the sample it gets."""
    if found is None:
        return None, None
    if found.turn_id is None or found.reward is None:
        return found.why, None
    return found.why, ExtraSample(found.turn_id, found.reward, found.why)


def _turn_result(turn: SessionTurn, outcome: TurnOutcome, why: str) -> TurnResult:
    return TurnResult(
        turn_id=turn.turn_id,
        number=turn.number,
        kind=TurnKind.MAIN,
        outcome=outcome,
        verdict=turn.verdict,
        sample=outcome is TurnOutcome.SAMPLED,
        step=None,
        why=why[:WHY_LIMIT],
    )
