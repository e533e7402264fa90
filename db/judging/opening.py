"""Opens judgements, of any number of turns in a handful of statements.

Every function works in the caller's transaction. The statements go to psycopg directly, in a pipeline: with SQLAlchemy
each takes several times the CPU, and each judged turn pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from cachetools import LRUCache
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import JudgementId, TurnId, new_judgement_id
from clawloop.judging.records import OpenJudgement
from clawloop.recipes.recipe import Recipe
from db.content import content_of
from db.database import raw_connection
from db.judging.votes import read_open
from db.training.recipes import recipe_by_hash

# A policy has few recipes in use, and a recipe never changes; reading one is a large part of opening a judgement.
_RECIPES: LRUCache[str, Recipe] = LRUCache(64)

# Keeps them from being erased, in the order of erasures.
_KEEP = "SELECT id, outcome FROM turns WHERE id = ANY(%b::uuid[]) ORDER BY id FOR KEY SHARE"
# Two openings of one turn's judgement come one after the other. New turns may refer to a turn that is locked so.
_LOCK = "SELECT id, outcome FROM turns WHERE id = ANY(%b::uuid[]) ORDER BY id FOR NO KEY UPDATE"
# Statements of their own: they see what was committed while this transaction waited for the locks.
_FACTS = """
    SELECT t.id, s.policy, p.recipe_hash, j.id, j.recipe_hash
    FROM unnest(%b::uuid[], %b::int[]) AS r(turn_id, revision)
    JOIN turns t ON t.id = r.turn_id JOIN sessions s ON s.id = t.session_id JOIN policies p ON p.id = s.policy
    LEFT JOIN judgements j ON j.turn_id = t.id AND j.revision = r.revision
"""
_INSERT = """
    INSERT INTO judgements (id, turn_id, recipe_hash, revision, shown_by, evidence_hash)
    SELECT * FROM unnest(%b::uuid[], %b::uuid[], %b::text[], %b::int[], %s::uuid[], %b::bytea[])
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of `activities.judging.ports.JudgementStore.open`."""

    turn_id: TurnId
    next_turn_id: TurnId | None
    evidence_hash: bytes
    hint_kind: str
    revision: int = 0


async def open_judgement(connection: AsyncConnection, opening: Opening) -> OpenJudgement:
    """
    Raises:
        RecordUnusable: as `JudgementStore.open`.
    """
    (opened,) = await open_judgements(connection, [opening])
    if isinstance(opened, Exception):
        raise opened
    return opened


async def open_judgements(
    connection: AsyncConnection, openings: Sequence[Opening]
) -> list[OpenJudgement | RecordUnusable]:
    """A judgement of each turn: continued, or made now under its policy's recipe.

    Args:
        openings: of different turns.
    """
    raw = await raw_connection(connection)
    turns = [opening.turn_id for opening in openings]
    later = [opening.next_turn_id for opening in openings if opening.next_turn_id is not None]
    async with raw.pipeline():
        kept = await raw.execute(_KEEP, [[*turns, *later]])
        locked = await raw.execute(_LOCK, [turns])
        facts = await raw.execute(_FACTS, [turns, [opening.revision for opening in openings]])
    outcomes: dict[UUID, str] = dict(await kept.fetchall()) | dict(await locked.fetchall())
    found = {row[0]: row[1:] for row in await facts.fetchall()}
    opened: list[OpenJudgement | RecordUnusable] = []
    new: list[tuple[Any, ...]] = []
    for opening in openings:
        try:
            require_kept(opening.turn_id, outcomes)
            if opening.next_turn_id is not None:
                require_kept(opening.next_turn_id, outcomes)
        except RecordUnusable as error:
            opened.append(error)
            continue
        policy, current, judgement, own = found[opening.turn_id]
        if judgement is not None:
            # A judgement in progress keeps its recipe, whatever the policy's recipe is by now.
            opened.append(await read_open(connection, JudgementId(judgement), own, opening.hint_kind))
        elif current is None:
            opened.append(RecordUnusable(f"policy {policy!r} has no recipe"))
        else:
            recipe = await _recipe(connection, current)
            id_ = new_judgement_id()
            opened.append(OpenJudgement(id_, recipe, {}, {}))
            digest = content_of(connection).write_digest(opening.evidence_hash)
            new.append((id_, opening.turn_id, current, opening.revision, opening.next_turn_id, digest))
    if new:
        await raw.execute(_INSERT, [list(column) for column in zip(*new, strict=True)])
    return opened


async def lock_turn(connection: AsyncConnection, turn_id: TurnId, next_turn_id: TurnId | None) -> None:
    """Lock a turn, and keep the one that holds its next state from being erased.

    Raises:
        RecordUnusable: one of them was erased.
    """
    raw = await raw_connection(connection)
    later = [] if next_turn_id is None else [next_turn_id]
    async with raw.pipeline():
        kept = await raw.execute(_KEEP, [[turn_id, *later]])
        locked = await raw.execute(_LOCK, [[turn_id]])
    outcomes: dict[UUID, str] = dict(await kept.fetchall()) | dict(await locked.fetchall())
    for one in (turn_id, *later):
        require_kept(one, outcomes)


def require_kept(turn_id: TurnId, outcomes: Mapping[UUID, str]) -> None:
    """
    Raises:
        RecordUnusable: the turn was erased.
    """
    if outcomes[turn_id] == TurnOutcome.ERASED:
        raise RecordUnusable(f"turn {turn_id} was erased")


async def _recipe(connection: AsyncConnection, recipe_hash: str) -> Recipe:
    if (known := _RECIPES.get(recipe_hash)) is None:
        known = _RECIPES[recipe_hash] = await recipe_by_hash(connection, recipe_hash)
    return known
