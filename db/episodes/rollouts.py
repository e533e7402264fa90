"""A policy's rollouts in PostgreSQL: how they run, whether they are paused, which groups start next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.episodes import GroupState, NextGroups, RolloutsPlan, RolloutsState, RolloutsView
from clawloop.core.episodes.curriculum import groups_to_move
from clawloop.core.episodes.kinds import KINDS, chosen_task_id
from clawloop.core.errors import NotFound, RecordUnusable, StateConflict
from clawloop.core.ids import EpisodeId, RolloutGroupId, new_rollout_group_id
from db.content import storable
from db.database import PostgresStore, transaction
from db.episodes.curriculum import begin_curriculum, draw_tasks, kind_views
from db.episodes.settling import settle_group
from db.tables import EpisodeRow, PolicyRow, RolloutGroupRow, RolloutsRow
from db.training.policies import insert_event, lock_policy, require_policy

# Room -----------------------------------------------------------------------------------------------------------------
# Number of further groups that a policy's rollouts have room for.
#
# A group takes room for its episodes until their agents have ended: verifiers and the settlement keep no place that
# the next group could use. The next group starts when its first episode has room. Its others wait for places of their
# workers, whose number bounds what runs at a time: so each place is taken again as soon as it is free, and neither the
# slowest episode of a group nor many that begin at once keep the others waiting. So that groups whose verifiers are
# away do not pile up, no more than twice as many as are in flight are ever open.

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


# Rollouts -------------------------------------------------------------------------------------------------------------
# A policy's rollouts in PostgreSQL: how they run, whether they are paused, which groups start next.

# Groups that wait to be trained: more would be stale when their step comes.
_BATCHES_AHEAD = 2
_LIMITS = text("""
    SELECT p.paused_reason, r.hash IS NOT NULL AS learns,
        CAST(r.content->'train'->>'batch_groups' AS int) AS batch_groups,
        (SELECT count(DISTINCT s.rollout_group_id) FROM samples s
            WHERE s.policy = p.id AND s.state = 'fresh' AND s.rollout_group_id IS NOT NULL) AS waiting
    FROM policies p LEFT JOIN recipes r ON r.hash = p.recipe_hash WHERE p.id = :policy
""")
_NEWEST = text("""
    SELECT g.reason, g.mean_reward IS NOT NULL AS scored,
        EXISTS (SELECT FROM samples s WHERE s.rollout_group_id = g.id) AS sampled
    FROM rollout_groups g WHERE g.policy = :policy AND g.state <> 'open' AND g.created_at >= :since
    ORDER BY g.finished_at DESC LIMIT :limit
""")
_COUNTS = text("""
    SELECT count(*) FILTER (WHERE state = 'open') AS in_flight, count(*) FILTER (WHERE state = 'settled') AS settled,
        count(*) FILTER (WHERE state = 'dropped') AS dropped,
        (SELECT avg(n.mean_reward) FROM (
            SELECT mean_reward FROM rollout_groups WHERE policy = :policy AND mean_reward IS NOT NULL
            ORDER BY finished_at DESC LIMIT 20) n) AS recent_reward
    FROM rollout_groups WHERE policy = :policy
""")
# Groups of a mistyped environment, or of one whose worker is gone: no episode of theirs has ended or has a turn.
_UNTOUCHED = text("""
    SELECT g.id FROM rollout_groups g
    WHERE g.policy = :policy AND g.state = 'open' AND g.environment <> :environment AND NOT EXISTS (
        SELECT FROM episodes e WHERE e.group_id = g.id
            AND (e.state <> 'running' OR EXISTS (SELECT FROM turns t WHERE t.episode_id = e.id)))
    ORDER BY g.id
""")


class PostgresRolloutStore(PostgresStore):
    """Satisfies `clawloop.operations.rollouts.RolloutsStore`."""

    @transaction
    async def next_groups(self, connection: AsyncConnection, policy: str) -> NextGroups:
        query = select(RolloutsRow.__table__).where(RolloutsRow.policy == policy).with_for_update()
        row = (await connection.execute(query)).one_or_none()
        is_open = select(RolloutGroupRow.id).where(
            RolloutGroupRow.policy == policy, RolloutGroupRow.state == GroupState.OPEN
        )
        groups = [RolloutGroupId(group) for group in await connection.scalars(is_open.order_by(RolloutGroupRow.id))]
        if row is None:
            return NextGroups(False, groups, "never started")
        if row.paused_reason is not None:
            return NextGroups(False, groups, f"paused: {row.paused_reason}")
        if (barren := await _barren(connection, row)) is not None:
            await _pause(connection, policy, barren)
            return NextGroups(False, groups, f"paused: {barren}")
        if (wait := await _must_wait(connection, policy)) is not None:
            return NextGroups(True, groups, wait)
        missing = (await room_of(connection, row)).groups
        started = [new_rollout_group_id() for _ in range(missing)]
        chosen = await draw_tasks(connection, row, missing) if row.curriculum else [None] * missing
        for number, (group, kind) in enumerate(zip(started, chosen, strict=True), start=row.next_task):
            values = {
                "id": group,
                "policy": policy,
                "environment": row.environment,
                "task": f"train-{number}" if kind is None else chosen_task_id(number, kind),
                "kind": None if kind is None else kind.kind,
                "level": None if kind is None else kind.level,
                "size": row.group_size,
                "state": GroupState.OPEN,
            }
            await connection.execute(insert(RolloutGroupRow).values(values))
        if started:
            counted = update(RolloutsRow).where(RolloutsRow.policy == policy)
            await connection.execute(counted.values(next_task=row.next_task + missing))
        return NextGroups(True, [*groups, *started], f"{missing} groups started")

    @transaction
    async def running(self, connection: AsyncConnection) -> list[str]:
        is_open = select(RolloutGroupRow.id).where(
            RolloutGroupRow.policy == RolloutsRow.policy, RolloutGroupRow.state == GroupState.OPEN
        )
        query = select(RolloutsRow.policy).where(or_(RolloutsRow.paused_reason.is_(None), is_open.exists()))
        return list(await connection.scalars(query.order_by(RolloutsRow.policy)))

    @transaction
    async def start(self, connection: AsyncConnection, policy: str, plan: RolloutsPlan) -> RolloutsView:
        if (await _require_policy(connection, policy)).retired_at is not None:
            message = f"The policy {policy!r} was retired: start rollouts of another policy."
            raise StateConflict(message, code="policy_retired", field="policy")
        values = {
            "environment": storable(plan.environment),
            "group_size": plan.size,
            "groups_in_flight": plan.groups,
            "barren_limit": plan.barren_limit,
            "curriculum": plan.curriculum,
            "paused_reason": None,
            "started_at": func.now(),
        }
        new = upsert(RolloutsRow).values(policy=policy, **values)
        await connection.execute(new.on_conflict_do_update(index_elements=[RolloutsRow.policy], set_=values))
        untouched = {"policy": policy, "environment": storable(plan.environment)}
        for group in (await connection.scalars(_UNTOUCHED, untouched)).all():
            await settle_group(connection, RolloutGroupId(group))
        if plan.curriculum:
            await begin_curriculum(connection, policy, plan.environment)
        await insert_event(
            connection,
            policy,
            "rollouts_started",
            environment=plan.environment,
            size=plan.size,
            groups=plan.groups,
            curriculum=plan.curriculum,
        )
        return await _view(connection, policy)

    @transaction
    async def pause(self, connection: AsyncConnection, policy: str, reason: str) -> RolloutsView:
        await _require_policy(connection, policy)
        row = await connection.scalar(select(RolloutsRow.policy).where(RolloutsRow.policy == policy))
        if row is None:
            message = f"policy {policy!r} has no rollouts: `clawloop rollouts start` starts them"
            raise NotFound(message, code="rollouts_not_found", field="policy")
        await _pause(connection, policy, reason)
        return await _view(connection, policy)

    @transaction
    async def status(self, connection: AsyncConnection, policy: str) -> RolloutsView:
        await require_policy(connection, policy)
        return await _view(connection, policy)

    @transaction
    async def oldest_open(self, connection: AsyncConnection, environment: str, limit: int) -> list[RolloutGroupId]:
        is_open = [RolloutGroupRow.environment == storable(environment), RolloutGroupRow.state == GroupState.OPEN]
        query = select(RolloutGroupRow.id).where(*is_open).order_by(RolloutGroupRow.id).limit(limit)
        return [RolloutGroupId(group) for group in await connection.scalars(query)]


async def end_rollouts(connection: AsyncConnection, policy: str, why: str) -> None:
    """Pause the policy's rollouts and settle its open groups, in the caller's transaction, which has locked the policy.

    Episodes that run are abandoned, and their workflows find their groups settled.
    """
    # The row's lock first: `next_groups` makes groups under it, and those must be found.
    paused = update(RolloutsRow).where(RolloutsRow.policy == policy)
    await connection.execute(paused.values(paused_reason=func.coalesce(RolloutsRow.paused_reason, why)))
    is_open = [RolloutGroupRow.policy == policy, RolloutGroupRow.state == GroupState.OPEN]
    for group in (await connection.scalars(select(RolloutGroupRow.id).where(*is_open))).all():
        await settle_group(connection, RolloutGroupId(group))


async def _require_policy(connection: AsyncConnection, policy: str) -> PolicyRow:
    try:
        return await lock_policy(connection, storable(policy))
    except RecordUnusable as error:
        raise NotFound(f"{error}.", code="policy_not_found", field="policy") from None


async def _pause(connection: AsyncConnection, policy: str, reason: str) -> None:
    paused = update(RolloutsRow).where(RolloutsRow.policy == policy)
    await connection.execute(paused.values(paused_reason=storable(reason)))
    await insert_event(connection, policy, "rollouts_paused", reason=reason)


async def _barren(connection: AsyncConnection, row: Any) -> str | None:
    """The reason that rollouts pause, if none of the newest groups since their start gave a sample; else None.

    A curriculum can change that all succeed or all fail, so it first gets the groups that it needs to move every kind.
    """
    limit = row.barren_limit
    if row.curriculum:
        limit = max(limit, groups_to_move(len(KINDS.get(row.environment, {})), row.group_size))
    parameters = {"policy": row.policy, "since": row.started_at, "limit": limit}
    newest = (await connection.execute(_NEWEST, parameters)).all()
    if not any(group.scored for group in newest[: row.barren_limit]):
        limit, newest = row.barren_limit, newest[: row.barren_limit]
    if len(newest) < limit or any(group.sampled for group in newest):
        return None
    return f"{len(newest)} groups in a row gave no sample; the last: {newest[0].reason}"


async def _last_unscored(connection: AsyncConnection, row: Any) -> str:
    """The reason that the newest finished group of this environment has no reward, e.g. that its task cannot be played;
    empty if it has one."""
    group = RolloutGroupRow
    query = select(group.reason, group.mean_reward).where(
        group.policy == row.policy, group.environment == row.environment, group.state != GroupState.OPEN
    )
    newest = (await connection.execute(query.order_by(group.finished_at.desc()).limit(1))).one_or_none()
    return "" if newest is None or newest.mean_reward is not None else f"the last group: {newest.reason}"


async def _must_wait(connection: AsyncConnection, policy: str) -> str | None:
    limits = (await connection.execute(_LIMITS, {"policy": policy})).one()
    if limits.paused_reason is not None:
        return f"training is paused: {limits.paused_reason}"
    if limits.learns and limits.waiting >= _BATCHES_AHEAD * limits.batch_groups:
        return f"{limits.waiting} groups wait to be trained"
    return None


async def _view(connection: AsyncConnection, policy: str) -> RolloutsView:
    row = (await connection.execute(select(RolloutsRow.__table__).where(RolloutsRow.policy == policy))).one_or_none()
    counts = (await connection.execute(_COUNTS, {"policy": policy})).one()
    plan = None
    state, reason = RolloutsState.NEVER_STARTED, "`clawloop rollouts start` starts them"
    if row is not None:
        plan = RolloutsPlan(row.environment, row.group_size, row.groups_in_flight, row.barren_limit, row.curriculum)
        state = RolloutsState.RUNNING if row.paused_reason is None else RolloutsState.PAUSED
        reason = row.paused_reason or await _must_wait(connection, policy) or await _last_unscored(connection, row)
    return RolloutsView(
        policy=policy,
        state=state,
        reason=reason,
        plan=plan,
        in_flight=counts.in_flight,
        settled=counts.settled,
        dropped=counts.dropped,
        recent_reward=None if counts.recent_reward is None else float(counts.recent_reward),
        curriculum=[] if row is None or not row.curriculum else await kind_views(connection, row),
    )
