"""Reads what a recipe's schedule depends on, in the caller's transaction."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.recipes.recipe import Recipe
from clawloop.recipes.schedule import CHAT_MINUTES, Closed, closed_by, day_begin
from db.tables import VersionRow

# A reply that takes longer is cut by the gateway's own limits.
_LONGEST_REPLY = timedelta(hours=1)
# Ids of turns begin with the time at which the turn began, so their index serves for times.
_CHAT_P95 = text("""
    SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY extract(epoch FROM finished_at - started_at))
    FROM turns WHERE id >= :first AND finished_at >= :since AND status IN ('complete', 'length')
        AND kind = 'main' AND episode_id IS NULL
""")
# The training workflow looks again this often; the sweep decides once a minute.
_RECHECK_SECONDS = 60.0


def closed_by_canary(canary: int | None, pinned: int | None) -> Closed | None:
    """No batch is claimed while a canary is open, so that nothing is trained from what may be rolled back."""
    if canary is None:
        return None
    if pinned is not None:
        why = f"version {canary} is a canary that no conversation gets while version {pinned} is pinned"
        return Closed(f"{why}; `clawloop policy pin --none` goes on with it", _RECHECK_SECONDS)
    return Closed(f"version {canary} is a canary, and its verdicts have not decided yet", _RECHECK_SECONDS)


async def read_closed(connection: AsyncConnection, policy: str, recipe: Recipe) -> Closed | None:
    """The reason that the policy's schedule lets no batch be claimed now; None if it lets one."""
    schedule = recipe.train.schedule
    if schedule is None:
        return None
    now = (await connection.execute(select(func.now()))).scalar_one()
    made, chat_p95 = 0, None
    if schedule.versions_a_day:
        today = VersionRow.created_at >= day_begin(schedule, now)
        # The version that a policy began from does not count as made by it.
        own = (VersionRow.policy == policy, VersionRow.n > 0, VersionRow.origin_policy.is_(None))
        count = select(func.count()).where(*own, today)
        made = (await connection.execute(count)).scalar_one()
    if schedule.chat_seconds:
        since = now - timedelta(minutes=CHAT_MINUTES)
        parameters = {"first": first_id(since - _LONGEST_REPLY), "since": since}
        found = (await connection.execute(_CHAT_P95, parameters)).scalar_one()
        chat_p95 = None if found is None else float(found)
    return closed_by(schedule, now, made, chat_p95)


def first_id(moment: datetime) -> UUID:
    """No turn that began later has a smaller id: UUIDv7 begins with its milliseconds."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)
