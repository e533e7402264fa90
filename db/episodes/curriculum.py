"""Curricula in PostgreSQL: the state of each kind of task, moved by what its finished groups count.

The caller holds the lock of the policy's row in `rollouts`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.episodes import KindView
from clawloop.core.episodes.curriculum import (
    SUCCESS,
    Counted,
    KindState,
    Trial,
    draw,
    first_state,
    revise,
    success_of,
)
from clawloop.core.episodes.kinds import KINDS, ChosenKind, Levels
from clawloop.core.errors import ValueRejected
from db.tables import CurriculumKindRow
from db.training.policies import insert_event

# A lost episode leaves its group with fewer rewards: somewhat more groups than full ones would need.
_GROUPS = text("""
    SELECT c.kind, g.scored, g.succeeded
    FROM curriculum_kinds c CROSS JOIN LATERAL (
        SELECT g.id, count(e.id) AS scored, count(e.id) FILTER (WHERE e.reward >= :success) AS succeeded
        FROM (
            SELECT id FROM rollout_groups
            WHERE policy = c.policy AND environment = c.environment AND kind = c.kind AND level = c.level
                AND created_at >= c.changed_at AND state <> 'open'
            ORDER BY id DESC LIMIT 2 * c.patience / :size + 1) g
        JOIN episodes e ON e.group_id = g.id AND e.state = 'scored'
        GROUP BY g.id) g
    WHERE c.policy = :policy AND c.environment = :environment
    ORDER BY c.kind, g.id DESC
""")


def require_kinds(environment: str) -> Mapping[str, Levels]:
    """The kinds of an environment's tasks.

    Raises:
        ValueRejected: it has none, so that there is nothing to choose.
    """
    if environment not in KINDS:
        known = ", ".join(sorted(KINDS))
        message = f"A curriculum needs an environment with kinds of tasks ({known}), not {environment!r}."
        raise ValueRejected(message, field="curriculum")
    return KINDS[environment]


async def begin_curriculum(connection: AsyncConnection, policy: str, environment: str) -> None:
    """Insert the kinds that the policy has no state of.

    Raises:
        ValueRejected: the environment has no kinds of tasks.
    """
    states = [first_state(kind, levels) for kind, levels in require_kinds(environment).items()]
    rows = [{"policy": policy, "environment": environment, "kind": state.kind, **_values(state)} for state in states]
    await connection.execute(insert(CurriculumKindRow).values(rows).on_conflict_do_nothing())


async def draw_tasks(connection: AsyncConnection, row: Any, count: int) -> list[ChosenKind]:
    """The kinds of the policy's next tasks; what was counted since the last call moves them first.

    Args:
        row: of `rollouts`.
    """
    states: list[KindState] = []
    for state, levels, groups, _ in await _kinds(connection, row):
        moved, why = revise(state, levels, groups)
        if moved != state:
            await _move(connection, row, moved, why)
        states.append(moved)
    drawn = [draw(states, number) for number in range(row.next_task, row.next_task + count)]
    return [ChosenKind(state.kind, state.level) for state in drawn]


async def kind_views(connection: AsyncConnection, row: Any) -> list[KindView]:
    """The policy's curriculum, by kind.

    Args:
        row: of `rollouts`.
    """
    return [
        KindView(
            kind=state.kind,
            level=state.level,
            hardest=levels.hardest,
            weight=state.weight,
            success=success_of(groups),
            scored=sum(group.scored for group in groups),
            needed=state.needed,
            trial_of=None if state.trial is None else state.trial.level,
            why=why,
        )
        for state, levels, groups, why in await _kinds(connection, row)
    ]


async def _kinds(connection: AsyncConnection, row: Any) -> list[tuple[KindState, Levels, Sequence[Counted], str]]:
    """Each kind's state, levels, finished groups since it changed, newest first, and why it changed."""
    of_policy = {"policy": row.policy, "environment": row.environment}
    counted: defaultdict[str, list[Counted]] = defaultdict(list)
    for group in await connection.execute(_GROUPS, {**of_policy, "size": row.group_size, "success": SUCCESS}):
        counted[group.kind].append(Counted(group.scored, group.succeeded))
    query = select(CurriculumKindRow.__table__).filter_by(**of_policy).order_by(CurriculumKindRow.kind)
    known = KINDS.get(row.environment, {})
    # A version may have dropped a kind, or its hardest levels.
    return [
        (_state(kind, known[kind.kind]), known[kind.kind], counted[kind.kind], kind.why)
        for kind in await connection.execute(query)
        if kind.kind in known
    ]


def _state(row: Any, levels: Levels) -> KindState:
    trial = None if row.trial_of is None else Trial(row.trial_of, row.success_before)
    return KindState(row.kind, min(row.level, levels.hardest), row.weight, row.patience, trial)


async def _move(connection: AsyncConnection, row: Any, state: KindState, why: str) -> None:
    where = {"policy": row.policy, "environment": row.environment, "kind": state.kind}
    moved = update(CurriculumKindRow).filter_by(**where)
    await connection.execute(moved.values({**_values(state), "why": why, "changed_at": func.now()}))
    await insert_event(
        connection,
        row.policy,
        "curriculum_moved",
        environment=row.environment,
        task_kind=state.kind,
        level=state.level,
        weight=state.weight,
        reason=why,
    )


def _values(state: KindState) -> dict[str, Any]:
    return {
        "level": state.level,
        "weight": state.weight,
        "patience": state.patience,
        "trial_of": None if state.trial is None else state.trial.level,
        "success_before": None if state.trial is None else state.trial.success,
    }
