"""Closing a session in PostgreSQL: what is still undecided, and its end in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import and_, case, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import JudgementId, SessionId, TurnId
from clawloop.judging.records import ClosingSession, Ending, ExtraSample, SessionTurn
from clawloop.samples.rewards import MemberResult
from db.database import Database
from db.exact_json import storable
from db.judging.direct_votes import direct_from_text
from db.judging.rewards import finalize_groups_of, finalize_outcome_of
from db.tables import Judgement, Session, Turn
from db.training.queue import lock_policy, lock_policy_of, refresh_work
from db.training.recipes import recipe_of_policy
from db.training.samples import insert_sample

# What follows a turn: every main turn below it, over side turns, which do not count.
_TURNS = text("""
    WITH RECURSIVE numbered AS (
        SELECT id, outcome, row_number() OVER (ORDER BY id) AS number, count(*) OVER () AS main_turns
        FROM turns WHERE session_id = :session AND kind = 'main'),
    wanted AS (SELECT * FROM numbered WHERE :all_turns OR outcome = 'waiting'),
    down AS (
        SELECT w.id AS turn_id, t.id, t.kind FROM wanted w JOIN turns t ON t.parent_turn_id = w.id
        WHERE w.outcome = 'waiting'
        UNION ALL
        SELECT d.turn_id, t.id, t.kind FROM down d JOIN turns t ON t.parent_turn_id = d.id WHERE d.kind = 'side')
    SELECT w.id, w.outcome, w.number, w.number = w.main_turns AS last, j.verdict, j.expected, j.not_trainable,
        j.decided_at IS NOT NULL AS judged,
        (SELECT v.raw FROM votes v WHERE v.judgement_id = j.id AND v.kind = 'direct') AS direct,
        (SELECT count(*) FROM samples s WHERE s.turn_id = w.id AND s.state <> 'superseded') AS samples,
        ARRAY(SELECT d.id FROM down d WHERE d.turn_id = w.id AND d.kind = 'main' ORDER BY d.id) AS followed_by
    FROM wanted w
    LEFT JOIN LATERAL (
        SELECT * FROM judgements WHERE turn_id = w.id AND decided_at IS NOT NULL
        ORDER BY revision DESC, decided_at DESC LIMIT 1) j ON true
    ORDER BY w.id
""")
# A spooled one that is older than the newest leaves its session closed.
_came_since = (
    select(Turn.id)
    .where(Turn.session_id == Session.id, Turn.kind == TurnKind.MAIN, Turn.outcome != TurnOutcome.ERASED)
    .where(Turn.entered_at > Session.closed_at)
    .correlate(Session)
    .exists()
)
_closed = and_(Session.state == SessionState.CLOSED, ~_came_since)
_RELATED = text("""
    SELECT EXISTS (
        SELECT FROM turns t JOIN judgements j ON j.turn_id = t.id JOIN recipes r ON r.hash = j.recipe_hash
        WHERE t.session_id = :session AND r.content->'signal'->>'reward' <> 'verdict')
""")


class PostgresClosingStore:
    """Satisfies `activities.judging.ports.ClosingStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def look(self, session: SessionId) -> ClosingSession | None:
        """What a closing must decide; None if there is no such session.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_look, session))

    async def finalize_related(self, session: SessionId) -> tuple[list[MemberResult], str | None]:
        """Settle groups and outcome of a session that closes: what is not known by now will not be.

        Returns:
            What became of their members, and the policy that has a batch waiting since this call.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_finalize_related, session))

    async def close(
        self, session: SessionId, why: str, endings: Sequence[Ending], guarantee: str | None, extra: ExtraSample | None
    ) -> str | None:
        """End undecided turns and the session in one transaction. Turns decided meanwhile stay as they are, and so does
        when and why a session was closed that nothing has come to since.

        Args:
            guarantee: what the at-least-one rule did; the first close's word stays.
            extra: its sample.

        Returns:
            The policy that has a batch waiting since this call; None if it has none, or had one before.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_close, session, why, endings, guarantee, extra))


async def _look(session: SessionId, connection: AsyncConnection) -> ClosingSession | None:
    query = select(Session.policy, Session.first_closed_at, Session.task_outcome, _closed.label("closed"))
    row = (await connection.execute(query.where(Session.id == session))).first()
    if row is None:
        return None
    first = row.first_closed_at is None
    try:
        signal = (await recipe_of_policy(connection, row.policy)).signal
    except RecordUnusable:
        signal = None
    turns = [
        SessionTurn(
            turn_id=TurnId(turn.id),
            number=turn.number,
            outcome=TurnOutcome(turn.outcome),
            judged=turn.judged,
            followed_by=[TurnId(after) for after in turn.followed_by],
            last=turn.last,
            expected=turn.expected,
            verdict=turn.verdict,
            trainable=turn.not_trainable is None if turn.judged else None,
            samples=turn.samples,
            direct=None if turn.direct is None else direct_from_text(turn.direct),
        )
        for turn in await connection.execute(_TURNS, {"session": session, "all_turns": first})
    ]
    count = select(func.count()).where(Turn.session_id == session, Turn.kind == "main")
    return ClosingSession(
        session,
        turns,
        first,
        signal is not None and signal.at_least_one,
        main_turns=await connection.scalar(count) or 0,
        related=bool(await connection.scalar(_RELATED, {"session": session})),
        by_outcome=row.task_outcome is not None and signal is not None and signal.reward == "outcome_process",
        closed=row.closed,
    )


async def _finalize_related(session: SessionId, connection: AsyncConnection) -> tuple[list[MemberResult], str | None]:
    policy: str = (await connection.execute(select(Session.policy).where(Session.id == session))).scalar_one()
    await lock_policy(connection, policy)
    ends = await finalize_groups_of(connection, session)
    ends += await finalize_outcome_of(connection, session, closing=True)
    return ends, policy if await refresh_work(connection, policy) else None


async def _sample_anyway(connection: AsyncConnection, extra: ExtraSample) -> None:
    turn_id, reward, why = extra.turn_id, extra.reward, extra.why
    outcome = select(Turn.outcome).where(Turn.id == turn_id).with_for_update()
    if (await connection.execute(outcome)).scalar_one() == TurnOutcome.ERASED:
        return
    newest = (
        select(Judgement.id)
        .where(Judgement.turn_id == turn_id, Judgement.decided_at.is_not(None))
        .order_by(Judgement.revision.desc(), Judgement.decided_at.desc())
        .limit(1)
    )
    judgement = JudgementId((await connection.execute(newest)).scalar_one())
    decided = {"outcome": TurnOutcome.SAMPLED, "why": why}
    await connection.execute(update(Judgement).where(Judgement.id == judgement).values(decided))
    await insert_sample(connection, judgement, turn_id, reward, None, why)
    await connection.execute(
        update(Turn).where(Turn.id == turn_id).values(outcome=TurnOutcome.SAMPLED, outcome_detail=why)
    )


async def _close(
    session: SessionId,
    why: str,
    endings: Sequence[Ending],
    guarantee: str | None,
    extra: ExtraSample | None,
    connection: AsyncConnection,
) -> str | None:
    policy = None
    if extra is not None:
        policy = await lock_policy_of(connection, extra.turn_id)
    # Before its turns, as whoever enters or erases some.
    await connection.execute(select(Session.id).where(Session.id == session).with_for_update())
    if extra is not None:
        await _sample_anyway(connection, extra)
    for end in endings:
        undecided = update(Turn).where(Turn.id == end.turn_id, Turn.outcome == TurnOutcome.WAITING)
        await connection.execute(undecided.values(outcome=end.outcome, outcome_detail=storable(end.why)))
    # A turn that came in meanwhile has not been told to this workflow yet: its session stays open.
    unheard = select(Turn.id).where(
        Turn.session_id == session, Turn.kind == "main", Turn.outcome == TurnOutcome.WAITING
    )
    values = {
        "state": case((unheard.exists(), Session.state), else_=SessionState.CLOSED),
        "first_closed_at": func.coalesce(Session.first_closed_at, func.now()),
        # One that was closed already was only looked into, e.g. for feedback.
        "closed_at": case((_closed, Session.closed_at), else_=func.now()),
        "closed_why": case((_closed, Session.closed_why), else_=storable(why)),
        "guarantee": func.coalesce(Session.guarantee, guarantee),
    }
    await connection.execute(update(Session).where(Session.id == session).values(values))
    return policy if policy is not None and await refresh_work(connection, policy) else None
