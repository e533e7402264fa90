"""`clawloop key`: API keys and their limits. Heavy imports happen inside a verb."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.operations import with_operations
from clawloop.app.cli.terminal import (
    AsJson,
    Data,
    age,
    fail,
    running_settings,
    show_facts,
    show_json,
    show_table,
    when,
    with_database,
)

if TYPE_CHECKING:
    from clawloop.app.processes.operations import Operations
    from clawloop.core.contracts.serving import KeyUse

# Keys -----------------------------------------------------------------------------------------------------------------
# `clawloop key`: API keys. Heavy imports happen inside a verb.

key_app = typer.Typer(no_args_is_help=True, help="API keys.")


@key_app.command("create")
def create_key(
    scope: Annotated[list[str] | None, typer.Option(help="chat (default), admin, read or worker; repeatable.")] = None,
    name: Annotated[str, typer.Option(help="A label shown by `key list`.")] = "",
    policy: Annotated[str, typer.Option(help="The policy the key gives access to.")] = "default",
    policies: Annotated[
        str, typer.Option(help="Policies that the header X-Clawloop-Policy may choose besides, separated by commas.")
    ] = "",
    any_policy: Annotated[bool, typer.Option("--any-policy", help="The header may choose any policy.")] = False,
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days after which the key expires.")] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. The secret is not stored and cannot be shown again."""
    from clawloop.core.contracts.serving import ANY_POLICY, Scope

    try:
        scopes = frozenset(Scope(value) for value in scope or ["chat"])
    except ValueError as error:
        raise typer.BadParameter(f"{error}: use chat, admin, read or worker", param_hint="--scope") from None
    may_choose = [ANY_POLICY] if any_policy else [named for part in policies.split(",") if (named := part.strip())]
    created = with_operations(data, lambda operations: operations.keys.create(policy, scopes, name, days, may_choose))
    if as_json:
        show_json(created)
    else:
        typer.echo(created.key)


@key_app.command("list")
def list_keys(data: Data = None, as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    keys = with_operations(data, lambda operations: operations.keys.list())
    if as_json:
        show_json(keys)
        return
    rows = [
        {
            "prefix": key.prefix,
            "scopes": ",".join(sorted(key.scopes)),
            "policy": ",".join((key.policy, *key.policies)),
            "age": age(key.created_at),
            "ends": _end_of(key.expires_at, key.revoked_at),
            "name": key.name,
        }
        for key in keys.keys
    ]
    show_table(rows)


def _end_of(expires_at: datetime | None, revoked_at: datetime | None) -> str:
    if revoked_at is not None:
        return f"revoked {age(revoked_at)} ago"
    return "" if expires_at is None else f"{expires_at:%Y-%m-%d}"


@key_app.command("show")
def show_keys(data: Data = None, as_json: AsJson = False) -> None:
    """Show the keys again that `clawloop up` made, from keys.json in the data folder."""
    from clawloop.app.local.keys_file import read_keys

    path = running_settings(data).data / "keys.json"
    kept = read_keys(path)
    if not kept:
        fail(f"{path} has no keys: `clawloop up` makes it; `clawloop key create` makes a key")
    if as_json:
        import json

        typer.echo(json.dumps(kept))
    else:
        show_facts(kept)


@key_app.command("renew-signing")
def renew_signing(data: Data = None) -> None:
    """Have a new secret sign the keys of the next episodes; keys that were handed out end with their episodes."""
    from db.serving.keys import PostgresKeyStore

    with_database(data, lambda database: PostgresKeyStore(database).drop_signing_secret())
    typer.echo("The next episode's key is signed with a new secret.")


@key_app.command("revoke")
def revoke_key(
    prefix: Annotated[str, typer.Argument(help="The key's public part or its beginning, or its name.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key. Gateways refuse it within 30 s."""
    revoked = with_operations(data, lambda operations: operations.keys.revoke(prefix))
    if as_json:
        show_json(revoked)
    else:
        typer.echo(f"{revoked.prefix} is revoked.")


# Limits ---------------------------------------------------------------------------------------------------------------
# `clawloop key limit`: what a key may use, and when it was used. Heavy imports happen inside a verb.

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
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "stored_mib": stored_mib,
    }
    changed = {name: value or None for name, value in given.items() if value is not None}

    async def apply(operations: Operations) -> KeyUse:
        use = await operations.keys.use_of(prefix)
        if not changed:
            return use
        return await operations.keys.set_limits(use.prefix, dataclasses.replace(use.limits, **changed))

    use = with_operations(data, apply)
    if as_json:
        show_json(use)
        return
    facts = {"prefix": use.prefix, "name": use.name, "policy": use.policy}
    facts |= {name: "" if value is None else str(value) for name, value in dataclasses.asdict(use.limits).items()}
    facts |= {"expires": when(use.expires_at), "revoked": when(use.revoked_at), "newest turn": when(use.last_turn_at)}
    facts["stored"] = f"{use.stored_bytes / 2**20:.1f} MiB"
    show_facts(facts)
