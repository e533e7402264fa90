"""Samples in PostgreSQL. What a turn has already (ids, log-probs) is not written twice.

Every function works in the caller's transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import JudgementId, SampleId, TurnId, new_sample_id
from db.arrays import ids_to_bytes
from db.exact_json import storable
from db.tables import SampleRow, SessionRow, TurnRow

# In any other state a step has it, or had it: what is decided now comes too late for this sample.
_OPEN = (SampleState.FRESH, SampleState.SUPERSEDED)

# A turn shows what became of its newest sample; an erased one shows only that.
_SET_OUTCOMES = text("""
    UPDATE turns t SET outcome = :outcome, outcome_detail = coalesce(:why, j.why)
    FROM samples s JOIN judgements j ON j.id = s.judgement_id
    WHERE s.id = ANY(:samples) AND t.id = s.turn_id AND t.outcome <> 'erased' AND NOT EXISTS (
        SELECT FROM samples later WHERE later.turn_id = t.id AND later.id > s.id AND later.state <> 'superseded')
""")
# As a claim locks them: both rows are ours then, and a turn that somebody judges or moves at this moment is passed
# over. The next claim lets such a sample expire.
_OF_OTHER_SIGNAL = text("""
    SELECT s.id FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
        JOIN recipes r ON r.hash = j.recipe_hash
    WHERE s.policy = :policy AND s.state = 'fresh' AND r.signal_hash <> (
        SELECT own.signal_hash FROM policies p JOIN recipes own ON own.hash = p.recipe_hash WHERE p.id = :policy)
    ORDER BY s.id LIMIT :limit FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
# A sample takes 0.1 ms, and one transaction must end within its limit; what is beyond expires at the next claims.
_MOST_EXPIRED, _CHUNK = 10_000, 500
RECIPE_CHANGED = "recipe changed"

# Somebody may have rated the turn while a step had its sample: then the later judgement counts.
_FREE = text("""
    UPDATE samples s SET state = CASE WHEN o.overruled THEN 'superseded' ELSE 'fresh' END,
        reason = CASE WHEN o.overruled THEN 'a later judgement replaced this one' ELSE coalesce(o.why, '') END
    FROM (
        SELECT own.id, j.why, EXISTS (
            SELECT FROM judgements newer WHERE newer.turn_id = own.turn_id AND newer.revision > j.revision
                AND newer.decided_at IS NOT NULL) AS overruled
        FROM samples own JOIN judgements j ON j.id = own.judgement_id WHERE own.id = ANY(:samples)) o
    WHERE s.id = o.id RETURNING s.id, o.overruled
""")


async def insert_sample(
    connection: AsyncConnection,
    judgement: JudgementId,
    turn_id: TurnId,
    reward: float | None,
    hinted_prompt_ids: Sequence[int] | None,
    reason: str,
) -> None:
    """The judgement's sample; made once, and changed as long as no step has taken it."""
    query = select(SessionRow.policy).join(TurnRow, TurnRow.session_id == SessionRow.id).where(TurnRow.id == turn_id)
    values = {
        "state": SampleState.FRESH,
        "reason": reason,
        "reward": reward,
        "hinted_prompt_ids": None if hinted_prompt_ids is None else ids_to_bytes(hinted_prompt_ids),
    }
    new = insert(SampleRow).values(
        id=new_sample_id(),
        judgement_id=judgement,
        turn_id=turn_id,
        policy=(await connection.execute(query)).scalar_one(),
        **values,
    )
    await connection.execute(
        new.on_conflict_do_update(
            index_elements=[SampleRow.judgement_id], set_=values, where=SampleRow.state.in_(_OPEN)
        )
    )


async def others_taken(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId) -> bool:
    """Whether a step has a sample of another judgement of the turn, has learned from it or has set it aside.

    One that expired taught nothing, so that the turn may have another.
    """
    used = [*_OPEN, SampleState.EXPIRED]
    others = [SampleRow.turn_id == turn_id, SampleRow.judgement_id != judgement, SampleRow.state.not_in(used)]
    return await connection.scalar(select(SampleRow.id).where(*others).limit(1)) is not None


async def supersede_others(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId, reason: str) -> None:
    """Take back the samples of the turn's other judgements that no step has taken."""
    others = [SampleRow.turn_id == turn_id, SampleRow.judgement_id != judgement, SampleRow.state == SampleState.FRESH]
    values = {"state": SampleState.SUPERSEDED, "reason": f"judged again: {reason}"}
    await connection.execute(update(SampleRow).where(*others).values(values))


async def withdraw_sample(connection: AsyncConnection, judgement: JudgementId, reason: str) -> None:
    """Take back a sample no step has taken; nothing if there is none."""
    fresh = update(SampleRow).where(SampleRow.judgement_id == judgement, SampleRow.state == SampleState.FRESH)
    await connection.execute(fresh.values(state=SampleState.SUPERSEDED, reason=reason))


async def is_taken(connection: AsyncConnection, judgement: JudgementId) -> bool:
    """Whether a step has, or had, the judgement's sample."""
    state = await connection.scalar(select(SampleRow.state).where(SampleRow.judgement_id == judgement))
    return state is not None and state not in _OPEN


async def end_samples(
    connection: AsyncConnection, ends: Mapping[SampleId, str], state: SampleState, outcome: TurnOutcome
) -> None:
    """Give samples a state and a reason, and tell their turns.

    Args:
        ends: reason by sample.
        outcome: what their turns become.
    """
    by_reason: defaultdict[str, list[SampleId]] = defaultdict(list)
    for sample, why in ends.items():
        by_reason[storable(why)].append(sample)
    for why, samples in by_reason.items():
        await connection.execute(update(SampleRow).where(SampleRow.id.in_(samples)).values(state=state, reason=why))
        await set_turn_outcomes(connection, samples, outcome, why)


async def expire_other_signals(connection: AsyncConnection, policy: str) -> None:
    """Let waiting samples that were judged by another signal part than the policy's expire."""
    for _ in range(_MOST_EXPIRED // _CHUNK):
        asked = {"policy": policy, "limit": _CHUNK}
        found = [SampleId(sample) for sample in await connection.scalars(_OF_OTHER_SIGNAL, asked)]
        ends = dict.fromkeys(found, RECIPE_CHANGED)
        await end_samples(connection, ends, SampleState.EXPIRED, TurnOutcome.EXPIRED)
        if len(found) < _CHUNK:
            return


async def set_turn_outcomes(
    connection: AsyncConnection, samples: Collection[SampleId], outcome: TurnOutcome, why: str | None
) -> None:
    """Let these samples' turns show what became of them.

    Args:
        why: None: what the judgement said.
    """
    await connection.execute(_SET_OUTCOMES, {"samples": list(samples), "outcome": outcome.value, "why": why})


async def free_samples(connection: AsyncConnection, policy: str, samples: Collection[SampleId]) -> None:
    """Let a later step take them, but for those whose turn has been judged anew since.

    Where the policy was given another signal part meanwhile, they expire.
    """
    rows = (await connection.execute(_FREE, {"samples": list(samples)})).all()
    freed = [SampleId(row.id) for row in rows if not row.overruled]
    await set_turn_outcomes(connection, freed, TurnOutcome.SAMPLED, None)
    await expire_other_signals(connection, policy)
