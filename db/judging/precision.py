"""Votes on turns of episodes that have a reward, in PostgreSQL."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.episodes.curriculum import SUCCESS
from clawloop.judging.precision import VotedTurn
from clawloop.judging.records import VOTES
from db.database import Database, transaction
from db.exact_json import storable
from db.training.policies import require_policy

# The newest ones: a judge, or what it judges, may have changed since older ones.
_MOST_TURNS = 10_000
_VOTED = text("""
    WITH judged AS (
        SELECT j.id, e.reward >= :success AS succeeded
        FROM rollout_groups g JOIN episodes e ON e.group_id = g.id AND e.state = 'scored'
            JOIN turns t ON t.episode_id = e.id JOIN judgements j ON j.turn_id = t.id AND j.revision = 0
        WHERE g.policy = :policy ORDER BY t.id DESC LIMIT :most)
    SELECT judged.succeeded, array_agg(v.score ORDER BY v.index) AS votes
    FROM judged JOIN votes v ON v.judgement_id = judged.id AND v.kind = :kind
    GROUP BY judged.id, judged.succeeded
""")


class PostgresVoteReader:
    """Satisfies `clawloop.operations.precision.VoteReader`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def voted_turns(self, connection: AsyncConnection, policy: str) -> list[VotedTurn]:
        await require_policy(connection, policy)
        parameters = {"policy": storable(policy), "success": SUCCESS, "kind": VOTES, "most": _MOST_TURNS}
        return [VotedTurn(row.votes, row.succeeded) for row in await connection.execute(_VOTED, parameters)]
