"""The policies of a demo's runs: each begins as the untrained model and has a recipe and a key of its own.

Knows nothing about chats. So several runs share one engine start, and none learns from another.
"""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.contracts.serving import Scope
from clawloop.demo.plan import PlannedRun
from clawloop.demo.recipes import demo_recipe
from db.database import BACKGROUND_LIMIT, Database
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe


async def insert_policies(database_url: str, base_model: str, runs: Sequence[PlannedRun]) -> dict[PlannedRun, str]:
    """Make the policies; returns a key for each, good for chatting and for the admin API.

    Raises:
        StoreUnavailable
    """
    database = Database(database_url, BACKGROUND_LIMIT)
    keys: dict[PlannedRun, str] = {}
    try:
        store = PostgresKeyStore(database)
        for run in runs:
            await ensure_policy(database, run.policy, base_model, [])
            await ensure_recipe(database, run.policy, demo_recipe(run.method))
            _, keys[run] = await store.create_key(run.policy, frozenset(Scope), name=f"demo, user {run.seed}")
    finally:
        await database.close()
    return keys
