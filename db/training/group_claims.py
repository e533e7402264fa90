"""Chooses the rollout groups of a step: the oldest whole ones it can learn from.

Works in the caller's transaction, which must hold the policy's lock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe
from db.training.claims import CLAIM_COLUMNS, Chosen, Eligibility, choice, expire_unusable
from db.training.samples import end_samples

# Group ids sort by the time the group was made.
_FRESH_GROUPS = text("""
    SELECT rollout_group_id AS id, count(*) AS size FROM samples
    WHERE policy = :policy AND state = 'fresh' AND rollout_group_id IS NOT NULL
        AND (CAST(:after AS uuid) IS NULL OR rollout_group_id > :after)
    GROUP BY rollout_group_id ORDER BY rollout_group_id LIMIT :limit
""")
_OF_GROUPS = text(f"""{CLAIM_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND s.rollout_group_id = ANY(:groups)
    ORDER BY s.rollout_group_id, s.id FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")


async def choose_groups(connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> Chosen:
    """All samples of `batch_groups` groups, or of fewer whose oldest sample has waited long enough, or none."""
    wanted = recipe.train.batch_groups
    eligibility = await Eligibility.of(connection, policy, recipe, head)
    usable: dict[UUID, list[Any]] = {}
    after: UUID | None = None
    while len(usable) < wanted:
        parameters = {"policy": policy, "after": after, "limit": wanted}
        sizes = {row.id: row.size for row in await connection.execute(_FRESH_GROUPS, parameters)}
        if sizes:
            usable |= await _usable_groups(connection, eligibility, policy, sizes)
        if len(sizes) < wanted:
            break
        after = max(sizes)
    groups = sorted(usable)[:wanted]
    rows = [row for group in groups for row in usable[group]]
    return choice(rows, f"{len(groups)} of {wanted} rollout groups", recipe, full=len(groups) >= wanted)


async def _usable_groups(
    connection: AsyncConnection, eligibility: Eligibility, policy: str, sizes: dict[UUID, int]
) -> dict[UUID, list[Any]]:
    """The groups a step can take, without those of which another transaction has locked a turn."""
    found = (await connection.execute(_OF_GROUPS, {"policy": policy, "groups": list(sizes)})).all()
    counts = Counter(row.rollout_group_id for row in found)
    rows = [row for row in found if counts[row.rollout_group_id] == sizes[row.rollout_group_id]]
    rows = await _expire_stale_groups(connection, eligibility, rows)
    groups: defaultdict[UUID, list[Any]] = defaultdict(list)
    for row in await expire_unusable(connection, eligibility, rows):
        groups[row.rollout_group_id].append(row)
    return dict(groups)


async def _expire_stale_groups(connection: AsyncConnection, eligibility: Eligibility, rows: list[Any]) -> list[Any]:
    """The rows without those of stale groups: a group is as old as its oldest turn."""
    bound = eligibility.recipe.train.group_staleness_versions
    oldest: dict[UUID, int] = {}
    for row in rows:
        if row.version == 0 or row.version in eligibility.parents:
            apart = eligibility.apart_from_head(row.version)
            oldest[row.rollout_group_id] = max(apart, oldest.get(row.rollout_group_id, 0))
    stale = {
        SampleId(row.id): f"stale: its group's oldest turn is {apart} versions apart, bound {bound}"
        for row in rows
        if (apart := oldest.get(row.rollout_group_id, 0)) > bound
    }
    await end_samples(connection, stale, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    return [row for row in rows if row.id not in stale]
