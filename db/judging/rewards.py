"""Rewards beyond a turn's own verdict in PostgreSQL, and samples of a judge that learns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.episodes.curriculum import SUCCESS
from clawloop.core.ids import JudgementId, RolloutGroupId, SessionId, TurnId, new_judgement_id, new_sample_id
from clawloop.core.judging.records import TurnDecision
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.samples.decision import is_held_out
from clawloop.core.samples.rewards import (
    CastVote,
    Member,
    RewardedVote,
    decide_by_outcome,
    decide_group,
    reward_votes,
    wait_for_outcome,
)
from db.content import content_of, storable, token_count
from db.database import PostgresStore, transaction
from db.encryption.columns import opened
from db.episodes.settling import recipe_if_any, turn_not_trainable
from db.tables import JudgementRow, SampleRow, TurnRow
from db.training.policies import lock_policy
from db.training.recipes import recipe_by_hash
from db.training.samples import insert_sample, withdraw_sample
from db.training.work_flag import refresh_work_flag

# Rewards --------------------------------------------------------------------------------------------------------------
# Rewards that depend on other turns or on the session, in PostgreSQL: group, outcome.
#
# Every function works in the caller's transaction, which must have locked the policy: no two finalize a group at once.

# Each turn with its newest decided judgement that was made under a recipe with this reward.
_MEMBERS = """
    SELECT t.id AS turn_id, t.session_id, j.id AS judgement, j.reward, j.not_trainable, j.why, j.taken,
        (SELECT avg(v.score) FROM votes v WHERE v.judgement_id = j.id) AS mean_vote,
        coalesce(ss.closed_at >= t.entered_at, false) AS closed, ss.task_outcome
    FROM turns t JOIN sessions ss ON ss.id = t.session_id
    LEFT JOIN LATERAL (
        SELECT d.*, s.state IS NOT NULL AND s.state NOT IN ('fresh', 'superseded') AS taken
        FROM judgements d JOIN recipes r ON r.hash = d.recipe_hash LEFT JOIN samples s ON s.judgement_id = d.id
        WHERE d.turn_id = t.id AND d.decided_at IS NOT NULL AND r.content->'signal'->>'reward' = '{reward}'
        ORDER BY d.revision DESC, d.decided_at DESC LIMIT 1) j ON true
    WHERE {chosen} AND t.kind = 'main' AND t.outcome <> 'erased'
    ORDER BY t.id
"""
_IN_GROUP = text(_MEMBERS.format(reward="group", chosen="t.group_id = :group"))
_BY_OUTCOME = text(_MEMBERS.format(reward="outcome_process", chosen="t.session_id = :session AND j.id IS NOT NULL"))
_ALONE = text(_MEMBERS.format(reward="outcome_process", chosen="t.id = :turn AND j.id IS NOT NULL"))
# Groups that were there when the session closed before are finalized already.
_OPEN_GROUPS = text("""
    SELECT DISTINCT t.group_id FROM turns t JOIN sessions ss ON ss.id = t.session_id
    WHERE t.session_id = :session AND t.group_id IS NOT NULL AND t.kind = 'main'
        AND (ss.closed_at IS NULL OR t.entered_at > ss.closed_at)
""")


async def finalize_group(
    connection: AsyncConnection, group: TurnId, *, closing: bool = False
) -> dict[TurnId, TurnDecision]:
    """Sample all members at once if none can still get a verdict; else their reasons name what they wait for."""
    rows = {TurnId(row.turn_id): row for row in await connection.execute(_IN_GROUP, {"group": group})}
    members = [_member(row) for row in rows.values()]
    decisions = decide_group(members, session_closed=closing or any(row.closed for row in rows.values()))
    for turn_id, decision in decisions.items():
        await _apply(connection, JudgementId(rows[turn_id].judgement), turn_id, decision)
    return decisions


async def finalize_groups_of(connection: AsyncConnection, session: SessionId) -> dict[TurnId, TurnDecision]:
    """Finalize all groups of a session that closes."""
    decisions: dict[TurnId, TurnDecision] = {}
    for group in (await connection.scalars(_OPEN_GROUPS, {"session": session})).all():
        decisions |= await finalize_group(connection, TurnId(group), closing=True)
    return decisions


async def finalize_by_outcome(connection: AsyncConnection, turn_id: TurnId) -> None:
    """Give a judged turn its reward if its session is closed; else its reason says that it waits for that."""
    for row in await connection.execute(_ALONE, {"turn": turn_id}):
        member = _member(row)
        if row.closed:
            decisions = decide_by_outcome([member], row.task_outcome)
        else:
            decisions = {} if row.reward is None else {turn_id: wait_for_outcome(member)}
        for decision in decisions.values():
            await _apply(connection, JudgementId(row.judgement), turn_id, decision)


async def finalize_outcome_of(
    connection: AsyncConnection, session: SessionId, *, closing: bool
) -> dict[TurnId, TurnDecision]:
    """Give judged turns of a session their rewards.

    Args:
        closing: True: the session is closing; reward the turns that came since it was last closed. False: its outcome
            was reported; reward the turns it was last closed with.
    """
    rows = [row for row in await connection.execute(_BY_OUTCOME, {"session": session}) if row.closed != closing]
    decisions = decide_by_outcome([_member(row) for row in rows], rows[0].task_outcome if rows else None)
    judgements = {row.turn_id: JudgementId(row.judgement) for row in rows}
    for turn_id, decision in decisions.items():
        await _apply(connection, judgements[turn_id], turn_id, decision)
    return decisions


def _member(row: Any) -> Member:
    mean_vote = None if row.mean_vote is None else float(row.mean_vote)
    return Member(TurnId(row.turn_id), row.reward, row.not_trainable, row.why or "", bool(row.taken), mean_vote)


async def _apply(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId, decision: TurnDecision) -> None:
    # The judgement's own reason stays: the group quotes it when it is finalized again.
    await connection.execute(update(JudgementRow).where(JudgementRow.id == judgement).values(outcome=decision.outcome))
    turn = update(TurnRow).where(TurnRow.id == turn_id, TurnRow.outcome != TurnOutcome.ERASED)
    await connection.execute(turn.values(outcome=decision.outcome, outcome_detail=storable(decision.why)))
    if decision.outcome is TurnOutcome.SAMPLED:
        await insert_sample(connection, judgement, turn_id, decision.reward, {}, decision.why)
    else:
        await withdraw_sample(connection, judgement, decision.why)


# Samples of judges ----------------------------------------------------------------------------------------------------
# Samples of a judge that learns: its own words, rewarded by whether its votes agree with the outcomes of episodes.
#
# A gateway recorded them as turns of the judge's policy. They wait for the rollout group of the turns that were
# judged.

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
        coalesce(t.prompt_shared, 0) + coalesce({token_count("t.prompt_ids")}, 0) AS prompt_tokens,
        {token_count("t.response_ids")} AS response_tokens
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


class PostgresJudgeSampleStore(PostgresStore):
    async def reward_votes(self) -> int:
        """Make samples of a learning judge's votes whose rollout group is settled; the number of samples."""
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
    rows = await connection.execute(_VOTES, {**these, "judge": judge})
    for row in opened(connection, rows, turns="id", tool_lists="tools_sha256"):
        if row.judged_by not in weights:
            weights[row.judged_by] = (await recipe_by_hash(connection, row.judged_by)).signal.process_weight
        votes.append(
            CastVote(
                turn=TurnId(row.id),
                vote=row.score,
                mean_vote=row.expected,
                succeeded=row.reward >= SUCCESS,
                process_weight=weights[row.judged_by],
                not_trainable=turn_not_trainable(row, []),
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
