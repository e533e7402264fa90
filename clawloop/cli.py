"""The `clawloop` program: verbs for people and for process supervisors.

Heavy imports happen inside a verb, so that `--help` stays quick. Exit codes: 0 done, 1 a one-line reason was
printed, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from clawloop.adapter_command import adapter_app
from clawloop.demo.command import demo_app
from clawloop.errors import ClawloopError
from clawloop.install import check_install
from clawloop.local.command import up_command

if TYPE_CHECKING:
    from clawloop.ids import SessionId
    from clawloop.local.up import Prepare, Surroundings
    from clawloop.settings import Settings
    from db.engine import Database

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
engine_app = typer.Typer(no_args_is_help=True, help="vLLM servers.")
session_app = typer.Typer(no_args_is_help=True, help="Conversations, and what became of their turns.")
app.add_typer(session_app, name="session")
app.add_typer(key_app, name="key")
app.add_typer(engine_app, name="engine")
app.add_typer(adapter_app, name="adapter")
app.add_typer(demo_app, name="demo")

Result = TypeVar("Result")
Data = Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback()
def clawloop() -> None:
    """A personal agent's model that gets better by being used."""


def _prepare_for_up() -> Prepare:
    from clawloop.processes import prepare
    from clawloop.running import Running, installation, write_running

    async def ready(around: Surroundings) -> dict[str, str]:
        write_running(around.data, Running(around.database_url, around.temporal_address))
        return await prepare(
            around.database_url,
            around.base_model,
            around.aliases,
            around.engines,
            around.keys,
            added_by=installation(around.data),
        )

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
    from clawloop.local.checks import choose_port, require_folder
    from clawloop.processes import GatewayOptions, run_gateway
    from clawloop.telemetry import configure_logging

    settings = _settings(data)
    require_folder(settings.data)
    chosen = choose_port("the gateway", host, port, "--port")
    configure_logging()
    options = GatewayOptions(host=host, port=chosen, allowed_hosts=frozenset(allowed_host or ()))
    asyncio.run(run_gateway(settings, options))


@app.command()
def worker(
    role: Annotated[str, typer.Argument(help="orchestrator or judge.")],
    health_port: Annotated[int, typer.Option(help="Loopback port of /healthz and /readyz; 0 serves none.")] = 0,
    data: Data = None,
) -> None:
    """Do what Temporal hands out: sessions and their ledger, or judging."""
    from clawloop.telemetry import configure_logging
    from clawloop.workers import Role, run_worker

    try:
        chosen = Role(role)
    except ValueError:
        raise typer.BadParameter(f"{role!r}: use {' or '.join(Role)}", param_hint="ROLE") from None
    configure_logging()
    asyncio.run(run_worker(chosen, _settings(data), health_port))


@app.command()
def migrate(
    base_model: Annotated[
        str | None, typer.Option(help="Make the default policy too: the name by which engines serve this model.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="With --base-model: one more name clients may use; repeatable.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="With --base-model: an engine's URL; repeatable.")] = None,
    data: Data = None,
) -> None:
    """Bring the database to this version's schema; with --base-model, to where a gateway can serve."""
    from clawloop.processes import begin, database_url
    from db.schema import migrate as bring_to_head

    if base_model is None and (alias or engine):
        raise typer.BadParameter("needs --base-model", param_hint="--alias" if alias else "--engine")
    url = database_url(_settings(data))
    bring_to_head(url)
    typer.echo("The database has this version's schema.")
    if base_model is not None:
        aliases = alias or [base_model.rsplit("/", 1)[-1].lower()]
        asyncio.run(begin(url, base_model, aliases, engine or []))
        typer.echo(f"The default policy is there, for {base_model}.")


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


@engine_app.command("remove")
def remove_engine(
    engine_id: Annotated[str, typer.Argument(help="As `engine list` shows it.")], data: Data = None
) -> None:
    """Forget an engine. Drain it first: replies it is giving are not waited for."""
    from db import serving_engines

    if not _with_database(data, lambda database: serving_engines.remove_engine(database, engine_id)):
        _fail(f"no engine {engine_id!r}; `clawloop engine list` shows them")
    typer.echo(f"{engine_id} is removed.")


@session_app.command("list")
def list_sessions(
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    state: Annotated[str | None, typer.Option(help="open, ending or closed.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show sessions, the one with the newest turn first."""
    from clawloop.contracts import SessionState
    from clawloop.story import session_row
    from db.sessions import PostgresSessionStore

    try:
        wanted = None if state is None else SessionState(state)
    except ValueError:
        raise typer.BadParameter(f"{state!r}: use {', '.join(SessionState)}", param_hint="--state") from None
    sessions = _with_database(
        data,
        lambda database: PostgresSessionStore(database).sessions(policy=policy, state=wanted, after=None, limit=limit),
    )
    _show([session_row(session) for session in sessions], as_json)


@session_app.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help="As `session list` shows it.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a session's turns, each with what became of it and why."""
    from clawloop.story import turn_row
    from db.sessions import PostgresSessionStore

    wanted = _uuid(session, "session")
    turns = _with_database(data, lambda database: PostgresSessionStore(database).turns(wanted))
    if not turns:
        _fail(f"no session {session!r}; `clawloop session list` shows them")
    _show([turn_row(turn) for turn in turns], as_json)


@app.command()
def why(
    turn: Annotated[str, typer.Argument(metavar="ID", help="A reply's id (chatcmpl-…) or a turn's.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Say what became of one reply, and why."""
    from clawloop.ids import turn_id_of
    from clawloop.story import turn_facts
    from clawloop.views import TurnView
    from db.sessions import PostgresSessionStore

    turn_id = turn_id_of(turn)

    async def look(database: Database) -> TurnView | None:
        store = PostgresSessionStore(database)
        session = None if turn_id is None else await store.session_of(turn_id)
        turns = [] if session is None else await store.turns(session)
        return next((view for view in turns if view.id == turn_id), None)

    found = _with_database(data, look)
    if found is None:
        _fail(f"no reply {turn!r} is stored")
        return
    facts = turn_facts(found)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<10} {value}")


def main() -> None:
    """Run a verb; what goes wrong is one line on standard error."""
    try:
        check_install()
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


def _uuid(text: str, what: str) -> SessionId:
    from uuid import UUID

    try:
        return cast("SessionId", UUID(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no {what} id") from None


def _when(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat(timespec="seconds")


def _fail(reason: str) -> NoReturn:
    typer.echo(f"clawloop: {reason}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
