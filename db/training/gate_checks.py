"""The evidence of the gate: held-out turns, stored checks, judged sessions of a canary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import (
    BatchSample,
    CheckResult,
    GateCheck,
    HeldOutScore,
    StepState,
    VersionRef,
)
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Gate
from db.content import exact_json, storable
from db.tables import GateCheckRow, StepRow, VersionRow
from db.training.claims import first_id
from db.training.policies import lock_policy
from db.training.samples import read_samples
from db.turns.read import ConversationCache

# Held-out turns -------------------------------------------------------------------------------------------------------
# Reads the held-out turns that a version is compared with its parent on, in the caller's transaction.

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
        replace(sample, reward=float(row.verdict), hinted_prompts={}, unit=row.unit)
        for sample in read.values()
        if isinstance(sample, BatchSample)
        for row in (rows[sample.sample_id],)
    ]


async def read_scores(connection: AsyncConnection, policy: str, version: int) -> dict[SampleId, float]:
    """Stored scores of held-out replies under a version, from its replay or a child version's replay."""
    query = select(VersionRow.held_out_scores).where(VersionRow.policy == policy, VersionRow.n == version)
    stored = (await connection.execute(query)).scalar_one_or_none() or {}
    return {SampleId(UUID(sample)): mean for sample, mean in stored.items()}


async def keep_scores(connection: AsyncConnection, version: VersionRef, scores: Sequence[HeldOutScore]) -> None:
    """Store a replay's scores with the version and its parent, in place of older scores."""
    of_version = {str(score.sample): score.version for score in scores if score.sample is not None}
    of_parent = {str(score.sample): score.parent for score in scores if score.sample is not None}
    for n, means in ((version.n, of_version), (version.parent, of_parent)):
        if means:
            row = update(VersionRow).where(VersionRow.policy == version.policy, VersionRow.n == n)
            await connection.execute(row.values(held_out_scores=exact_json(dict(means))))


# Checks ---------------------------------------------------------------------------------------------------------------
# Stores what the checks of the gate found about versions, in the caller's transaction.


async def insert_checks(connection: AsyncConnection, policy: str, version: int, checks: Sequence[GateCheck]) -> None:
    """Insert the checks of a version; one that is stored already stays."""
    for check in checks:
        row = {
            "policy": policy,
            "version": version,
            "name": check.name,
            "result": check.result,
            "reason": storable(check.reason),
            "figures": exact_json(dict(check.figures)),
        }
        await connection.execute(insert(GateCheckRow).values(row).on_conflict_do_nothing())


async def record_checks(connection: AsyncConnection, policy: str, version: int, checks: Sequence[GateCheck]) -> None:
    """Insert checks of a candidate; nothing once it is decided."""
    await lock_policy(connection, policy)
    state = select(StepRow.state).where(StepRow.policy == policy, StepRow.n == version)
    if (await connection.execute(state)).scalar_one_or_none() == StepState.CANDIDATE:
        await insert_checks(connection, policy, version, checks)


async def read_checks(connection: AsyncConnection, policy: str) -> dict[int, list[GateCheck]]:
    """The checks of the policy's versions, by version, oldest first."""
    checks: defaultdict[int, list[GateCheck]] = defaultdict(list)
    query = select(GateCheckRow).where(GateCheckRow.policy == policy).order_by(GateCheckRow.at, GateCheckRow.name)
    for row in await connection.execute(query):
        check = GateCheck(row.name, CheckResult(row.result), row.reason, row.figures)
        checks[row.version].append(check)
    return dict(checks)


# Sessions of a canary -------------------------------------------------------------------------------------------------
# Reads the judged sessions that a canary is decided by, in the caller's transaction.

# The newest verdict of each turn; a session that both versions answered is an observation of each. The parent may have
# become the active version after the canary began: then those before are of an older one, and no comparison.
_SESSIONS = text("""
    SELECT t.version = :canary AS of_canary, avg(j.verdict)::float8 AS mean
    FROM turns t JOIN sessions s ON s.id = t.session_id
        CROSS JOIN LATERAL (
            SELECT verdict FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
            ORDER BY revision DESC LIMIT 1) j
    WHERE s.policy = :policy AND t.id >= :first AND t.kind = 'main' AND t.started_at >= greatest(:since, (
            SELECT v.activated_at FROM versions v WHERE v.policy = :policy AND v.n = :other))
        AND t.episode_id IS NULL AND t.version IN (:canary, :other) AND j.verdict IS NOT NULL
    GROUP BY t.session_id, t.version
""")


async def read_canary_sessions(
    connection: AsyncConnection, policy: str, canary: int, other: int, since: datetime
) -> tuple[list[float], list[float]]:
    """The mean verdict of each judged session, −1 to 1: of the canary, and of the version before.

    Args:
        other: the version before.
        since: when the canary began.
    """
    parameters = {"policy": policy, "canary": canary, "other": other, "since": since, "first": first_id(since)}
    found = (await connection.execute(_SESSIONS, parameters)).all()
    return [row.mean for row in found if row.of_canary], [row.mean for row in found if not row.of_canary]
