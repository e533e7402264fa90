"""Policies of many people on one engine, each with an adapter of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import VersionRef
from clawloop.core.ids import version_name
from clawloop.serving.adapters import VllmControl
from db.database import BACKGROUND_LIMIT, Database
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from tests.e2e.adapters import random_versions


@dataclass(frozen=True, slots=True)
class Person:
    """
    Args:
        key: chats with the policy.
        version: active, and loaded.
    """

    key: str
    version: VersionRef


async def add_people(database_url: str, engine_url: str, model: Path, adapters: Path, count: int) -> list[Person]:
    """Policies `person-N` with one active version each, loaded into the engine, as steps and agents leave them."""
    written = await asyncio.to_thread(random_versions, model, adapters, range(1, count + 1))
    versions = [replace(version, policy=f"person-{version.n}", n=1, parent=0) for version in written]
    async with VllmControl(engine_url, adapters) as control:
        for version in versions:
            await control.load(version, version_name(version.policy, version.n, ""))
    database = Database(database_url, BACKGROUND_LIMIT)
    try:
        keys = PostgresKeyStore(database)
        people = []
        for version in versions:
            await ensure_policy(database, version.policy, model.name, [])
            _, secret = await keys.create_key(version.policy, {Scope.CHAT}, version.policy)
            people.append(Person(secret, version))
    finally:
        await database.close()
    await _activate(database_url, versions)
    return people


async def _activate(database_url: str, versions: Sequence[VersionRef]) -> None:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        for version in versions:
            await connection.execute(
                "INSERT INTO versions (policy, n, parent, path, sha256) VALUES (%s, %s, 0, %s, decode(%s, 'hex'))",
                [version.policy, version.n, version.path, version.sha256],
            )
            await connection.execute(
                "INSERT INTO engine_versions (engine_id, policy, version) SELECT id, %s, %s FROM engines",
                [version.policy, version.n],
            )
            await connection.execute(
                "UPDATE policies SET head = %s, active = %s WHERE id = %s", [version.n, version.n, version.policy]
            )
