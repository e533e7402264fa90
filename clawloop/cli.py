"""The `clawloop` program: verbs for people and for process supervisors.

Heavy imports happen inside a verb, so that `--help` stays quick. Exit codes: 0 done, 1 a one-line reason was
printed, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from clawloop.errors import ClawloopError
from clawloop.local.command import up_command

if TYPE_CHECKING:
    from clawloop.local.up import Prepare, Surroundings
    from clawloop.settings import Settings
    from db.engine import Database

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
engine_app = typer.Typer(no_args_is_help=True, help="vLLM servers.")
adapter_app = typer.Typer(no_args_is_help=True, help="Adapters, as directories.")
app.add_typer(key_app, name="key")
app.add_typer(engine_app, name="engine")
app.add_typer(adapter_app, name="adapter")

Result = TypeVar("Result")
Data = Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback()
def clawloop() -> None:
    """A personal agent's model that gets better by being used."""


def _prepare_for_up() -> Prepare:
    from clawloop.processes import prepare
    from clawloop.running import Running, write_running

    async def ready(around: Surroundings) -> dict[str, str]:
        write_running(around.data, Running(around.database_url, around.temporal_address))
        return await prepare(around.database_url, around.base_model, around.aliases, around.engines, around.keys)

    return ready


app.command("up")(up_command(lambda: _settings(None), _prepare_for_up))


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A name clients may address it by.")] = None,
    data: Data = None,
) -> None:
    """Serve the OpenAI-compatible API."""
    from clawloop.processes import GatewayOptions, run_gateway
    from clawloop.telemetry import configure_logging

    configure_logging()
    options = GatewayOptions(host=host, port=port, allowed_hosts=frozenset(allowed_host or ()))
    asyncio.run(run_gateway(_settings(data), options))


@app.command()
def migrate(data: Data = None) -> None:
    """Bring the database to this version's schema."""
    from clawloop.processes import database_url
    from db.schema import migrate as bring_to_head

    bring_to_head(database_url(_settings(data)))
    typer.echo("The database has this version's schema.")


@key_app.command("create")
def create_key(
    scope: Annotated[list[str] | None, typer.Option(help="chat (default) or admin; repeatable.")] = None,
    name: Annotated[str, typer.Option(help="So that you know it again.")] = "",
    policy: Annotated[str, typer.Option(help="The policy it talks to.")] = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It cannot be shown again."""
    from clawloop.contracts import Scope
    from db.keys import PostgresKeyStore

    try:
        scopes = frozenset(Scope(word) for word in scope or ["chat"])
    except ValueError as error:
        raise typer.BadParameter(f"{error}: use chat or admin", param_hint="--scope") from None
    _, secret = _with_database(data, lambda database: PostgresKeyStore(database).create_key(policy, scopes, name))
    typer.echo(json.dumps({"key": secret, "scopes": sorted(scopes)}) if as_json else secret)


@key_app.command("list")
def list_keys(data: Data = None, as_json: AsJson = False) -> None:
    """Show the keys, without their secrets."""
    from db.keys import PostgresKeyStore

    keys = _with_database(data, lambda database: PostgresKeyStore(database).list_keys())
    rows = [
        {
            "prefix": key.prefix,
            "name": key.name,
            "policy": key.policy,
            "scopes": ",".join(sorted(key.scopes)),
            "created": _when(key.created_at),
            "revoked": _when(key.revoked_at),
        }
        for key in keys
    ]
    _show(rows, as_json)


@key_app.command("revoke")
def revoke_key(
    prefix: Annotated[str, typer.Argument(help="The key's public part, as `key list` shows it.")],
    data: Data = None,
) -> None:
    """End a key. Gateways stop taking it within 30 s."""
    from db.keys import PostgresKeyStore

    if not _with_database(data, lambda database: PostgresKeyStore(database).revoke(prefix)):
        _fail(f"no key {prefix!r} that is still good; `clawloop key list` shows them")
    typer.echo(f"{prefix} is revoked.")


@engine_app.command("list")
def list_engines(data: Data = None, as_json: AsJson = False) -> None:
    """Show the engines."""
    from db import serving_engines

    engines = _with_database(data, serving_engines.list_engines)
    rows = [
        {
            "id": engine.id,
            "url": engine.url,
            "draining": str(engine.draining).lower(),
            "versions": " ".join(f"{policy}-v{n}" for policy, ns in engine.versions.items() for n in sorted(ns)),
        }
        for engine in engines
    ]
    _show(rows, as_json)


@engine_app.command("add")
def add_engine(url: Annotated[str, typer.Argument(help="e.g. http://127.0.0.1:8101")], data: Data = None) -> None:
    """Let gateways send requests to one more vLLM server."""
    from db import serving_engines

    engine = _with_database(data, lambda database: serving_engines.add_engine(database, url))
    typer.echo(f"{engine.id} is {engine.url}.")


@engine_app.command("drain")
def drain_engine(
    engine_id: Annotated[str, typer.Argument(help="As `engine list` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    data: Data = None,
) -> None:
    """Send an engine no new requests."""
    from db import serving_engines

    if not _with_database(data, lambda database: serving_engines.drain_engine(database, engine_id, not undo)):
        _fail(f"no engine {engine_id!r}; `clawloop engine list` shows them")
    typer.echo(f"{engine_id} takes requests again." if undo else f"{engine_id} takes no new requests.")


@adapter_app.command("merge")
def merge_adapter(
    base: Annotated[Path, typer.Option(help="Hugging Face checkpoint the adapter was trained on.")],
    adapter: Annotated[Path, typer.Option(help="Adapter in PEFT's format, e.g. a version's directory.")],
    out: Annotated[Path, typer.Option(help="Where the merged checkpoint goes; must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Fold an adapter into its base model and check the result against the two.

    It writes a Hugging Face checkpoint in bfloat16. Merging needs memory for one shard, the check for the model
    in float32.
    """
    from safetensors import SafetensorError

    from clawloop.training.merge import merge

    try:
        report = merge(base, adapter, out)
    except (OSError, SafetensorError) as error:  # no space, no permission; nothing is left at `out`
        _fail(f"{out} cannot be written: {error}")
    if as_json:
        typer.echo(json.dumps({"out": str(out), **asdict(report)}))
        return
    typer.echo(f"{out} is the base with the adapter folded in, in bfloat16.")
    typer.echo(
        f"Checked on random tokens: rounding moves its logits by {report.logit_error:.2%} of their norm; "
        f"the adapter had moved them by {report.logit_change:.2%}."
    )


def main() -> None:
    """Run a verb; what goes wrong is one line on standard error."""
    try:
        app()
    except ClawloopError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _settings(data: Path | None) -> Settings:
    from clawloop.settings import Settings

    settings = Settings()
    return settings if data is None else settings.model_copy(update={"data": data})


def _with_database(data: Path | None, work: Callable[[Database], Coroutine[Any, Any, Result]]) -> Result:
    from clawloop.processes import database_url
    from db.engine import BACKGROUND_LIMIT, Database

    async def run() -> Result:
        database = Database(database_url(_settings(data)), BACKGROUND_LIMIT)
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run())


def _show(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(rows[0] if rows else ["nothing yet"]))
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def _when(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat(timespec="seconds")


def _fail(reason: str) -> NoReturn:
    typer.echo(f"clawloop: {reason}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
