"""`clawloop key limit`: what a key may use, and when it was used. Heavy imports happen inside a verb."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from clawloop.cli.show import show_facts, show_json, when
from clawloop.cli.terminal import AsJson, Data, fail, with_database

Limit = Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="0: no limit.")]


def limit_key(
    prefix: Annotated[str, typer.Argument(help="The key's public part or its beginning, or its name.")],
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrency: Limit = None,
    stored_mib: Limit = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Set a key's limits, and show them with the key's policy, expiry and newest turn."""
    from clawloop.contracts.serving import KeyUse
    from clawloop.operations.keys import KeyOperations
    from db.database import Database
    from db.serving.key_uses import PostgresKeyUses
    from db.serving.keys import PostgresKeyStore

    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "stored_mib": stored_mib,
    }
    changed = {name: value or None for name, value in given.items() if value is not None}

    async def apply(database: Database) -> KeyUse | None:
        uses = PostgresKeyUses(database)
        found = await KeyOperations(PostgresKeyStore(database)).prefix_of(prefix)
        use = await uses.use_of(found)
        if use is None or not changed:
            return use
        return await uses.set_limits(found, dataclasses.replace(use.limits, **changed))

    use = with_database(data, apply)
    if use is None:
        fail(f"there is no key {prefix!r}; `clawloop key list` shows all keys")
    if as_json:
        show_json(use)
        return
    facts = {"prefix": use.prefix, "name": use.name, "policy": use.policy}
    facts |= {name: "" if value is None else str(value) for name, value in dataclasses.asdict(use.limits).items()}
    facts |= {"expires": when(use.expires_at), "revoked": when(use.revoked_at), "newest turn": when(use.last_turn_at)}
    facts["stored"] = f"{use.stored_bytes / 2**20:.1f} MiB"
    show_facts(facts)
