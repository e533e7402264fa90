"""Number of further groups that a policy's rollouts have room for.

A group takes room for its episodes until their agents have ended: verifiers and the settlement keep no place that the
next group could use. The next group starts when its first episode has room. Its others wait for places of their
workers, whose number bounds what runs at a time: so each place is taken again as soon as it is free, and neither the
slowest episode of a group nor many that begin at once keep the others waiting. So that groups whose verifiers are away
do not pile up, no more than twice as many as are in flight are ever open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import EpisodeId
from db.tables import EpisodeRow, RolloutGroupRow, RolloutsRow

_MOST_OPEN = 2
_BUSY = text("""
    SELECT count(*) AS open, coalesce(sum(g.size - (SELECT count(DISTINCT e.place) FROM episodes e
        WHERE e.group_id = g.id AND e.state IN ('ended', 'scored', 'unscored'))), 0) AS places
    FROM rollout_groups g WHERE g.policy = :policy AND g.environment = :environment AND g.state = 'open'
""")


@dataclass(frozen=True, slots=True)
class Room:
    """
    Args:
        groups: so many more may start.
        is_new: since the last episode ended.
    """

    groups: int
    is_new: bool


async def room_of(connection: AsyncConnection, rollouts: Any) -> Room:
    """
    Args:
        rollouts: the row of a policy's rollouts, locked: otherwise two ends at the same time see each only itself.
    """
    # Groups of an environment that was chosen before end by themselves, and may wait for a worker that never comes.
    of_these = {"policy": rollouts.policy, "environment": rollouts.environment}
    busy = (await connection.execute(_BUSY, of_these)).one()
    free = rollouts.groups_in_flight * rollouts.group_size - int(busy.places)
    with_room_for_one = free + rollouts.group_size - 1
    groups = min(with_room_for_one // rollouts.group_size, _MOST_OPEN * rollouts.groups_in_flight - busy.open)
    return Room(max(0, groups), groups > 0 and with_room_for_one % rollouts.group_size == 0)


async def lock_rollouts_of(connection: AsyncConnection, episode: EpisodeId) -> str | None:
    """Lock the row of the rollouts that an episode belongs to; their policy, None if it never had any."""
    query = select(RolloutsRow.policy).join(RolloutGroupRow, RolloutGroupRow.policy == RolloutsRow.policy)
    query = query.join(EpisodeRow, EpisodeRow.group_id == RolloutGroupRow.id).where(EpisodeRow.id == episode)
    policy: str | None = await connection.scalar(query.with_for_update(of=RolloutsRow))
    return policy


async def made_room(connection: AsyncConnection, policy: str) -> bool:
    """True if the episode that ended just now made room for another group. The policy's rollouts are locked."""
    rollouts = (await connection.execute(select(RolloutsRow.__table__).where(RolloutsRow.policy == policy))).one()
    return rollouts.paused_reason is None and (await room_of(connection, rollouts)).is_new
