"""Samples in PostgreSQL. What a turn has already (ids, log-probs) is not written twice.

Every function works in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts import SampleState
from clawloop.ids import JudgementId, TurnId, new_sample_id
from db.arrays import ids_to_bytes
from db.tables import Sample, Session, Turn

# In any other state a step has it, or had it: what is decided now comes too late for this sample.
_OPEN = (SampleState.FRESH, SampleState.SUPERSEDED)


async def put_sample(
    connection: AsyncConnection,
    judgement: JudgementId,
    turn_id: TurnId,
    reward: float | None,
    hinted_prompt_ids: Sequence[int] | None,
    reason: str,
) -> None:
    """The judgement's sample; made once, and changed as long as no step has taken it."""
    query = select(Session.policy).join(Turn, Turn.session_id == Session.id).where(Turn.id == turn_id)
    values = {
        "state": SampleState.FRESH,
        "reason": reason,
        "reward": reward,
        "hinted_prompt_ids": None if hinted_prompt_ids is None else ids_to_bytes(hinted_prompt_ids),
    }
    new = insert(Sample).values(
        id=new_sample_id(),
        judgement_id=judgement,
        turn_id=turn_id,
        policy=(await connection.execute(query)).scalar_one(),
        **values,
    )
    await connection.execute(
        new.on_conflict_do_update(index_elements=[Sample.judgement_id], set_=values, where=Sample.state.in_(_OPEN))
    )


async def supersede_older(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId, reason: str) -> bool:
    """Take back the fresh samples of the turn's other judgements; False if a step has, or had, one of them."""
    others = [Sample.turn_id == turn_id, Sample.judgement_id != judgement]
    fresh = update(Sample).where(*others, Sample.state == SampleState.FRESH)
    await connection.execute(fresh.values(state=SampleState.SUPERSEDED, reason=f"judged again: {reason}"))
    taken = select(Sample.id).where(*others, Sample.state.not_in(_OPEN)).limit(1)
    return await connection.scalar(taken) is None


async def withdraw_sample(connection: AsyncConnection, judgement: JudgementId, reason: str) -> None:
    """Take back a sample no step has taken; nothing if there is none."""
    fresh = update(Sample).where(Sample.judgement_id == judgement, Sample.state == SampleState.FRESH)
    await connection.execute(fresh.values(state=SampleState.SUPERSEDED, reason=reason))
