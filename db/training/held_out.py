"""Reads the held-out turns that a version is compared with its parent on, in the caller's transaction."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import BatchSample
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Gate
from db.training.batches import read_samples
from db.turns.conversation_cache import ConversationCache

# Turns judged before the step was claimed: every attempt at the step gets the same turns.
# One turn of each episode: the others have the same verdict, and the comparison takes its turns to be independent.
# The newest half of each verdict: a policy that is mostly praised has its blamed turns far back.
_NEWEST = text("""
    WITH held_out AS (
        SELECT DISTINCT ON (coalesce(t.episode_id, t.id)) s.id, d.verdict,
            coalesce(s.rollout_group_id, t.session_id) AS unit
        FROM samples s JOIN judgements j ON j.id = s.judgement_id JOIN turns t ON t.id = s.turn_id,
            LATERAL (SELECT CASE WHEN s.rollout_group_id IS NULL THEN j.verdict ELSE sign(s.reward) END AS verdict) d
        WHERE s.policy = :policy AND s.state = 'held_out' AND d.verdict <> 0 AND j.decided_at < :before
            AND t.outcome <> 'erased'
        ORDER BY coalesce(t.episode_id, t.id), s.id DESC)
    SELECT id, verdict, unit FROM held_out
    ORDER BY row_number() OVER (PARTITION BY verdict > 0 ORDER BY id DESC) <= :limit / 2 DESC, id DESC LIMIT :limit
""")


async def read_held_out(
    connection: AsyncConnection, conversations: ConversationCache, policy: str, before: datetime, gate: Gate
) -> list[BatchSample]:
    """The newest held-out turns with a verdict, half of them praised and half blamed if there are as many, oldest
    first, the verdict as the reward; damaged ones are left out.

    The verdict on a turn of an episode is whether the episode was better or worse than its group.
    """
    if not gate.held_out:
        return []
    parameters = {"policy": policy, "before": before, "limit": gate.replay_turns}
    rows = {SampleId(row.id): row for row in await connection.execute(_NEWEST, parameters)}
    read = await read_samples(connection, conversations, sorted(rows))
    return [
        replace(sample, reward=float(row.verdict), hinted_prompt_ids=None, unit=row.unit)
        for sample in read.values()
        if isinstance(sample, BatchSample)
        for row in (rows[sample.sample_id],)
    ]
