"""Probes in PostgreSQL: the operators' own, the general questions that the base model knows, and those drawn from
praised turns when a version is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import (
    AskedProbe,
    GateCheck,
    JudgedReply,
    ProbeContent,
    ProbePlan,
    StepState,
    StoredProbe,
)
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import NotFound, RecipeRejected, RecordUnusable, StateConflict
from clawloop.core.gate.checks import PROBES
from clawloop.core.gate.general import MIN_KNOWN
from clawloop.core.ids import ProbeId, TurnId, new_probe_id
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.turns.files import references_in
from db.content import content_of, exact_json, storable, token_count
from db.database import Database, PostgresStore, transaction
from db.encryption.columns import opened
from db.tables import PolicyRow, ProbeRow, VersionRow
from db.training.gate_checks import read_checks, record_checks
from db.training.policies import lock_policy, require_policy, version_ref
from db.training.recipes import recipe_by_hash
from db.training.steps import lock_step
from db.turns.read import ConversationCache, read_turn

# Among the newest, so that what the policy is asked for now is compared; each version gets others of them, and each
# attempt at the same version the same ones.
_PRAISED = text("""
    SELECT turn_id FROM (
        SELECT s.turn_id, s.id
        FROM samples s JOIN judgements j ON j.id = s.judgement_id JOIN turns t ON t.id = s.turn_id
        WHERE s.policy = :policy AND s.state IN ('held_out', 'fresh', 'trained') AND j.verdict = 1
            AND s.rollout_group_id IS NULL AND t.outcome <> 'erased'
        ORDER BY s.id DESC LIMIT 8 * :drawn) newest
    ORDER BY md5(turn_id::text || '/' || CAST(:n AS text))
""")
# Replies that were sampled, trained and held out alike: a verdict is older than what was learned from it.
_JUDGED = text(f"""
    SELECT {token_count("t.response_ids")} AS tokens, j.verdict
    FROM samples s JOIN judgements j ON j.id = s.judgement_id JOIN turns t ON t.id = s.turn_id
    WHERE s.policy = :policy AND j.verdict IN (1, -1) AND s.rollout_group_id IS NULL AND t.response_ids IS NOT NULL
    ORDER BY s.id DESC LIMIT 200
""")
# One of so many general questions may be thought about, so that thinking without an end is seen.
_THOUGHT_ABOUT = 4
# A longer prompt would cost an engine more than the answers to it.
_LONGEST_PROMPT = 4096


class PostgresProbeStore(PostgresStore):
    """Implements `clawloop.operations.probes.ProbeStore` and `activities.training.probe_version.ProbeStore`."""

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        super().__init__(database)
        self._conversations = conversations or ConversationCache()

    @transaction
    async def add(
        self, connection: AsyncConnection, policy: str, probes: Sequence[ProbeContent], most: int
    ) -> list[StoredProbe]:
        await _lock(connection, policy)
        count = select(func.count()).select_from(ProbeRow).where(ProbeRow.policy == policy, ProbeRow.general.is_(False))
        if (have := (await connection.execute(count)).scalar_one()) + len(probes) > most:
            raise StateConflict(
                f"Policy {policy!r} has {have} probes and can have {most}: remove some with `clawloop probe remove`.",
                code="too_many_probes",
                field="probes",
            )
        added = await _insert(connection, policy, probes)
        return [probe for probe in await _read(connection, policy) if probe.id in added]

    @transaction
    async def all(self, connection: AsyncConnection, policy: str) -> list[StoredProbe]:
        await require_policy(connection, policy)
        return await _read(connection, policy)

    @transaction
    async def remove(self, connection: AsyncConnection, policy: str, probe: ProbeId) -> bool:
        await _lock(connection, policy)
        row = delete(ProbeRow).where(ProbeRow.policy == policy, ProbeRow.id == probe)
        return (await connection.execute(row.returning(ProbeRow.id))).first() is not None

    @transaction
    async def lacks_general(self, connection: AsyncConnection, policy: str) -> bool:
        query = select(PolicyRow.general_known).where(PolicyRow.id == policy, PolicyRow.retired_at.is_(None))
        row = (await connection.execute(query)).one_or_none()
        return row is not None and row.general_known is None

    @transaction
    async def keep_general(self, connection: AsyncConnection, policy: str, known: Sequence[ProbeContent]) -> None:
        row = await lock_policy(connection, policy)
        if row.general_known is None:
            if len(known) >= MIN_KNOWN:
                await _insert(connection, policy, known, general=True)
            counted = update(PolicyRow).where(PolicyRow.id == policy).values(general_known=len(known))
            await connection.execute(counted)

    @transaction
    async def plan(self, connection: AsyncConnection, policy: str, n: int) -> ProbePlan | None:
        step = await lock_step(connection, policy, n)
        checks = (await read_checks(connection, policy)).get(n, [])
        if step.state != StepState.CANDIDATE or any(check.name == PROBES for check in checks):
            return None
        try:
            recipe = await recipe_by_hash(connection, step.recipe_hash)
        except RecipeRejected:  # of another version of Clawloop
            recipe = Recipe(name="default")
        stored = await _read(connection, policy)
        probes = [AskedProbe(probe.id, probe.content) for probe in stored if not probe.general]
        if recipe.gate.general_probes:
            general = [probe for probe in stored if probe.general]
            probes += [
                AskedProbe(probe.id, replace(probe.content, thinks=place % _THOUGHT_ABOUT == 0), general=True)
                for place, probe in enumerate(general)
            ]
        probes += await self._drawn(connection, policy, n, recipe.gate.drawn_probes)
        version = select(VersionRow).where(VersionRow.policy == policy, VersionRow.n == n)
        base = select(PolicyRow.base_model, PolicyRow.general_known).where(PolicyRow.id == policy)
        base_model, general_known = (await connection.execute(base)).one()
        return ProbePlan(
            policy=policy,
            base_model=base_model,
            candidate=version_ref((await connection.execute(version)).one()),
            parent=step.parent,
            recipe=recipe,
            probes=probes,
            general_known=general_known,
            judged=[
                JudgedReply(row.tokens, row.verdict) for row in await connection.execute(_JUDGED, {"policy": policy})
            ],
        )

    @transaction
    async def record(self, connection: AsyncConnection, policy: str, n: int, checks: Sequence[GateCheck]) -> None:
        await record_checks(connection, policy, n, checks)

    async def _drawn(self, connection: AsyncConnection, policy: str, n: int, drawn: int) -> list[AskedProbe]:
        probes: list[AskedProbe] = []
        if not drawn:
            return probes
        for turn_id in await connection.scalars(_PRAISED, {"policy": policy, "n": n, "drawn": drawn}):
            if len(probes) == drawn:
                break
            stored = await read_turn(connection, self._conversations, TurnId(turn_id))
            if stored is not None and _can_be_asked(stored.record):
                probes.append(AskedProbe(turn_id, _asked_again(stored.record)))
        return probes


def _can_be_asked(record: TurnRecord) -> bool:
    """True if the prompt is short enough, and whole: an engine accepts no reference in place of a file."""
    if record.prompt_ids is None or len(record.prompt_ids) > _LONGEST_PROMPT:
        return False
    return not references_in(record.messages)


def _asked_again(record: TurnRecord) -> ProbeContent:
    tools = [tool for tool in record.tools or () if isinstance(tool, dict)]
    return ProbeContent(messages=record.messages, tools=tools or None)


async def _lock(connection: AsyncConnection, policy: str) -> None:
    try:
        await lock_policy(connection, storable(policy))
    except RecordUnusable as error:
        raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy") from error


async def _insert(
    connection: AsyncConnection, policy: str, probes: Sequence[ProbeContent], *, general: bool = False
) -> set[ProbeId]:
    content = content_of(connection)
    rows: list[dict[str, Any]] = []
    for probe in probes:
        row = new_probe_id()
        written = content.write_json(exact_json(_written(probe)), "probes.content", row)
        rows.append({"id": row, "policy": policy, "content": written, "general": general})
    if rows:
        await connection.execute(insert(ProbeRow), rows)
    return {row["id"] for row in rows}


async def _read(connection: AsyncConnection, policy: str) -> list[StoredProbe]:
    """The policy's probes, an operator's own first."""
    rows = await connection.execute(
        select(ProbeRow).where(ProbeRow.policy == policy).order_by(ProbeRow.general, ProbeRow.id)
    )
    return [
        StoredProbe(ProbeId(row.id), ProbeContent(**row.content), row.created_at, row.general)
        for row in opened(connection, rows, probes="id")
    ]


def _written(probe: ProbeContent) -> dict[str, Any]:
    return {
        "messages": list(probe.messages),
        "tools": None if probe.tools is None else [dict(tool) for tool in probe.tools],
        "contains": list(probe.contains),
        "regex": probe.regex,
        "exact": probe.exact,
    }
