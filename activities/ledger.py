"""Closing a session: every main turn gets an outcome and a reason, and the session at least one sample if it can.

Knows nothing about judges: what could still be judged is said to the workflow first.
"""

from __future__ import annotations

from temporalio import activity

from activities.messages import WHY_LIMIT, Closed, CloseSession, TurnFate
from activities.pairing import find_next_state
from activities.ports import ClosingStore, Counts, TurnPlaces, Uncounted
from activities.work import WorkTelling
from clawloop.contracts import Outcome, TurnKind
from clawloop.ids import TurnId
from clawloop.judging.records import ClosingSession, Ending, ExtraSample, SessionTurn
from clawloop.samples.assembly import JudgedTurn, at_least_one

ELSEWHERE = "answer not in later history"
NEVER_JUDGED = "could not be judged before the session closed"
# The workflow judges them and comes again; a message of this many ids is small.
TO_JUDGE_LIMIT = 50


class LedgerActivities:
    """On the queue `ledger`: short, PostgreSQL only."""

    def __init__(
        self, store: ClosingStore, places: TurnPlaces, work: WorkTelling, counts: Counts | None = None
    ) -> None:
        self._store = store
        self._counts: Counts = counts or Uncounted()
        self._places = places
        self._work = work

    @activity.defn
    async def close_session(self, ask: CloseSession) -> Closed:
        """End a session, unless turns of it can still be judged: then say which, and change nothing."""
        session = await self._store.look(ask.session_id)
        if session is None:
            return Closed(to_judge=[], fates=[], guarantee="no such session")
        undecided = [turn for turn in session.turns if _is_undecided(turn, ask.up_to)]
        ends: list[tuple[SessionTurn, Ending]] = []
        to_judge: list[TurnId] = []
        for turn in undecided:
            if await self._has_next_state(turn):
                to_judge.append(turn.turn_id)
                ends.append((turn, Ending(turn.turn_id, Outcome.UNJUDGED, NEVER_JUDGED)))
            else:
                why = f"nothing followed: {ask.why}" if turn.last else ELSEWHERE
                ends.append((turn, Ending(turn.turn_id, Outcome.NO_FEEDBACK, why)))
        if to_judge and not ask.give_up:
            return Closed(to_judge=to_judge[:TO_JUDGE_LIMIT], fates=[], turns=session.main_turns)
        guarantee, extra = _guarantee(session)
        ready = await self._store.close(ask.session_id, ask.why, [end for _, end in ends], guarantee, extra)
        await self._work.tell(ready)
        self._counts.closed(guaranteed=extra is not None)
        fates = [_fate(turn, end.outcome, end.why) for turn, end in ends]
        if extra is not None:
            fates += [
                _fate(turn, Outcome.SAMPLED, extra.why) for turn in session.turns if turn.turn_id == extra.turn_id
            ]
        return Closed(to_judge=[], fates=fates, guarantee=guarantee or "", turns=session.main_turns)

    async def _has_next_state(self, turn: SessionTurn) -> bool:
        if not turn.followed_by:
            return False
        placed = await self._places.place(turn.turn_id)
        return placed is not None and await find_next_state(self._places, placed) is not None


def _is_undecided(turn: SessionTurn, up_to: TurnId | None) -> bool:
    return turn.outcome is Outcome.WAITING and (up_to is None or turn.turn_id <= up_to)


def _guarantee(session: ClosingSession) -> tuple[str | None, ExtraSample | None]:
    """What the at-least-one rule says; (None, None) where it does not apply."""
    if not session.first or not session.at_least_one:
        return None, None
    judged = [
        JudgedTurn(turn.turn_id, turn.expected, bool(turn.trainable), turn.samples > 0)
        for turn in session.turns
        if turn.judged
    ]
    found = at_least_one(judged)
    if found.turn_id is not None and found.reward is not None:
        return found.why, ExtraSample(found.turn_id, found.reward, found.why)
    # A direct vote could break the tie; no judge is asked for one yet.
    return "no sample: votes cancel out" if found.ask else found.why, None


def _fate(turn: SessionTurn, outcome: Outcome, why: str) -> TurnFate:
    return TurnFate(
        turn_id=turn.turn_id,
        number=turn.number,
        kind=TurnKind.MAIN,
        outcome=outcome,
        verdict=turn.verdict,
        sample=outcome is Outcome.SAMPLED,
        step=None,
        why=why[:WHY_LIMIT],
    )
