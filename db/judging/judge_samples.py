"""Samples of a judge that learns: its own words, rewarded by whether its votes agree with the outcomes of episodes.

A gateway recorded them as turns of the judge's policy. They wait for the rollout group of the turns that were judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.episodes.curriculum import SUCCESS
from clawloop.errors import ContentUnreadable
from clawloop.ids import RolloutGroupId, TurnId, new_judgement_id, new_sample_id
from clawloop.recipes.recipe import Recipe
from clawloop.samples.eligibility import PREFIX, unseen_parts
from clawloop.samples.holdout import is_held_out
from clawloop.samples.judge_rewards import CastVote, RewardedVote, reward_votes
from db.arrays import ID_BYTES
from db.content import content_of, plain_length
from db.database import Database, transaction
from db.episodes.settling import recipe_if_any, turn_not_trainable
from db.exact_json import storable
from db.tables import JudgementRow, SampleRow, TurnRow
from db.training.policies import lock_policy
from db.training.recipes import recipe_by_hash
from db.training.work_flag import refresh_work_flag

# Groups of one sweep; the next one goes on.
_MOST_GROUPS = 50
_OF_GROUP = """
    FROM votes v JOIN judgements j ON j.id = v.judgement_id JOIN turns judged ON judged.id = j.turn_id
        JOIN episodes e ON e.id = judged.episode_id JOIN rollout_groups g ON g.id = e.group_id
"""
# The turns of one request share the first one's id as their group.
_ASKED = "(t.id = v.asked_turn AND v.asked_choice = 0 OR t.group_id = v.asked_turn AND t.choice = v.asked_choice)"
# Votes are compared with those of their group, so a group waits for turns that a gateway stores later, and for
# judgements that end later. What has not come within the hour never will, e.g. because the gateway's disk was lost.
_SETTLED = text(f"""
    SELECT g.id {_OF_GROUP}
    WHERE v.asked_turn IS NOT NULL AND v.rewarded_at IS NULL AND g.state <> 'open'
    GROUP BY g.id
    HAVING bool_and(j.decided_at IS NOT NULL AND EXISTS (SELECT FROM turns t WHERE {_ASKED})
        OR v.answered_at < now() - interval '1 hour')
    ORDER BY g.id LIMIT :limit
""")
_PENDING = text(f"""
    SELECT v.judgement_id, v.kind, v.index, CASE WHEN s.policy <> g.policy THEN s.policy END AS judge
    {_OF_GROUP} LEFT JOIN turns t ON {_ASKED} LEFT JOIN sessions s ON s.id = t.session_id
    WHERE g.id = :group AND v.asked_turn IS NOT NULL AND v.rewarded_at IS NULL
""")
# Only the votes of `_PENDING`: others may come meanwhile.
_THESE = """(v.judgement_id, v.kind, v.index) IN (
    SELECT * FROM unnest(CAST(:judgements AS uuid[]), CAST(:kinds AS text[]), CAST(:indices AS int[])))"""
_VOTES = text(f"""
    SELECT v.score, j.expected, j.recipe_hash AS judged_by, e.reward, t.id, t.status, t.sampling, t.messages_added,
        t.tools_sha256, l.tools, t.logprobs,
        coalesce(t.prompt_shared, 0) + coalesce({plain_length("t.prompt_ids")}, 0) / {ID_BYTES} AS prompt_tokens,
        {plain_length("t.response_ids")} / {ID_BYTES} AS response_tokens
    {_OF_GROUP} JOIN turns t ON {_ASKED} JOIN sessions s ON s.id = t.session_id
        LEFT JOIN tool_lists l ON l.sha256 = t.tools_sha256
    WHERE {_THESE} AND v.rewarded_at IS NULL AND s.policy = :judge AND v.score IS NOT NULL
        AND j.expected IS NOT NULL AND e.reward IS NOT NULL AND t.kind = 'main'
        AND t.outcome IN ('waiting', 'no_feedback')
        AND NOT EXISTS (SELECT FROM judgements own WHERE own.turn_id = t.id)
    ORDER BY t.id FOR NO KEY UPDATE OF t
""")
_REWARDED = text(f"""
    UPDATE votes v SET rewarded_at = now() WHERE {_THESE} AND v.rewarded_at IS NULL
""")


class PostgresJudgeSampleStore:
    """Satisfies `activities.episodes.JudgedVotes`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reward_votes(self) -> int:
        groups = await self._settled()
        return sum([await self._reward_group(group) for group in groups])

    @transaction
    async def _settled(self, connection: AsyncConnection) -> list[RolloutGroupId]:
        found = await connection.execute(_SETTLED, {"limit": _MOST_GROUPS})
        return [RolloutGroupId(row.id) for row in found]

    @transaction
    async def _reward_group(self, connection: AsyncConnection, group: RolloutGroupId) -> int:
        samples = 0
        pending = (await connection.execute(_PENDING, {"group": group})).all()
        these = {
            "judgements": [vote.judgement_id for vote in pending],
            "kinds": [vote.kind for vote in pending],
            "indices": [vote.index for vote in pending],
        }
        # In the order of their names, so that no two transactions wait for each other.
        for judge in sorted({vote.judge for vote in pending if vote.judge is not None}):
            await lock_policy(connection, judge)
            recipe = await recipe_if_any(connection, judge)
            if recipe is not None:
                rewarded = reward_votes(await _cast_votes(connection, these, judge))
                samples += await _insert(connection, group, judge, recipe, rewarded)
                await refresh_work_flag(connection, judge)
        await connection.execute(_REWARDED, these)
        return samples


async def _cast_votes(connection: AsyncConnection, these: Mapping[str, Any], judge: str) -> list[CastVote]:
    weights: dict[str, float] = {}
    votes: list[CastVote] = []
    content = content_of(connection)
    for row in (await connection.execute(_VOTES, {**these, "judge": judge})).all():
        if row.judged_by not in weights:
            weights[row.judged_by] = (await recipe_by_hash(connection, row.judged_by)).signal.process_weight
        try:
            added = content.read_json(row.messages_added, "turns.messages_added", row.id)
            why = turn_not_trainable(row, unseen_parts(added), content)
        except ContentUnreadable as error:  # of one turn, which must not keep the others' votes
            why = f"{PREFIX}{error}"
        votes.append(
            CastVote(
                turn=TurnId(row.id),
                vote=row.score,
                mean_vote=row.expected,
                succeeded=row.reward >= SUCCESS,
                process_weight=weights[row.judged_by],
                not_trainable=why,
            )
        )
    return votes


async def _insert(
    connection: AsyncConnection, group: RolloutGroupId, judge: str, recipe: Recipe, votes: Sequence[RewardedVote]
) -> int:
    held_out = is_held_out(judge, group, recipe.gate.held_out)
    samples: list[dict[str, Any]] = []
    for vote in votes:
        outcome = vote.outcome
        if held_out and outcome is TurnOutcome.SAMPLED:
            outcome = TurnOutcome.HELD_OUT
        judgement, why = new_judgement_id(), storable(vote.why)
        made = {
            "id": judgement,
            "turn_id": vote.turn,
            "revision": 0,
            "recipe_hash": recipe.hash,
            "evidence_hash": content_of(connection).write_digest(hashlib.sha256(group.bytes).digest()),
            # No `reward`: what recipes make of a turn's own when its session closes must not replace the sample's.
            "verdict": (vote.reward > 0) - (vote.reward < 0),
            "verdict_why": why,
            "not_trainable": why if outcome is TurnOutcome.NOT_TRAINABLE else None,
            "outcome": outcome,
            "why": why,
            "decided_at": func.now(),
        }
        await connection.execute(insert(JudgementRow).values(made))
        turn = update(TurnRow).where(TurnRow.id == vote.turn)
        await connection.execute(turn.values(outcome=outcome, outcome_detail=why))
        if vote.advantage is not None:
            samples.append(
                {
                    "id": new_sample_id(),
                    "judgement_id": judgement,
                    "turn_id": vote.turn,
                    "policy": judge,
                    "state": SampleState.HELD_OUT if held_out else SampleState.FRESH,
                    "reason": why,
                    "reward": vote.advantage,
                }
            )
    if samples:
        await connection.execute(insert(SampleRow), samples)
    return len(samples)
