"""`clawloop key`: API keys. Heavy imports happen inside a verb."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from clawloop.cli.terminal import AsJson, Data, fail, show_rows, when, with_database

key_app = typer.Typer(no_args_is_help=True, help="API keys.")


@key_app.command("create")
def create_key(
    scope: Annotated[list[str] | None, typer.Option(help="chat (default), admin or read; repeatable.")] = None,
    name: Annotated[str, typer.Option(help="A label shown by `key list`.")] = "",
    policy: Annotated[str, typer.Option(help="The policy the key gives access to.")] = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. The secret is not stored and cannot be shown again."""
    from clawloop.contracts.serving import Scope
    from db.serving.keys import PostgresKeyStore

    try:
        scopes = frozenset(Scope(value) for value in scope or ["chat"])
    except ValueError as error:
        raise typer.BadParameter(f"{error}: use chat, admin or read", param_hint="--scope") from None
    _, secret = with_database(data, lambda database: PostgresKeyStore(database).create_key(policy, scopes, name))
    typer.echo(json.dumps({"key": secret, "scopes": sorted(scopes)}) if as_json else secret)


@key_app.command("list")
def list_keys(data: Data = None, as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    from db.serving.keys import PostgresKeyStore

    keys = with_database(data, lambda database: PostgresKeyStore(database).list_keys())
    rows = [
        {
            "prefix": key.prefix,
            "name": key.name,
            "policy": key.policy,
            "scopes": ",".join(sorted(key.scopes)),
            "created": when(key.created_at),
            "revoked": when(key.revoked_at),
        }
        for key in keys
    ]
    show_rows(rows, as_json)


@key_app.command("revoke")
def revoke_key(
    prefix: Annotated[str, typer.Argument(help="The key's public part, from `key list`.")],
    data: Data = None,
) -> None:
    """Revoke a key. Gateways refuse it within 30 s."""
    from db.serving.keys import PostgresKeyStore

    if not with_database(data, lambda database: PostgresKeyStore(database).revoke(prefix)):
        fail(f"there is no valid key {prefix!r}; `clawloop key list` shows all keys")
    typer.echo(f"{prefix} is revoked.")
