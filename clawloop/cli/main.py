"""The `clawloop` program: verbs for people and for process supervisors.

Heavy imports happen inside a verb, so that `--help` stays quick. Exit codes: 0 done, 1 a one-line reason was
printed, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from clawloop.cli.adapter import adapter_app
from clawloop.cli.check import check_command
from clawloop.cli.demo import demo_app
from clawloop.cli.demo_chat import chat_command
from clawloop.cli.demo_report import report_command
from clawloop.cli.demo_run import run_command
from clawloop.cli.erase import erase_command
from clawloop.cli.judge import judge_app
from clawloop.cli.terminal import AsJson, Data, fail, settings_of, show_facts, show_rows, when, with_database
from clawloop.cli.training import policy_app, recipe_app, training_app
from clawloop.cli.up import up_command
from clawloop.cli.worker import worker_app
from clawloop.errors import ClawloopError
from clawloop.processes.install_check import check_install, missing_extra
from clawloop.processes.process_exit import run_and_exit

if TYPE_CHECKING:
    from clawloop.ids import SessionId
    from clawloop.local.up import Prepare, Surroundings
    from db.database import Database

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
engine_app = typer.Typer(no_args_is_help=True, help="vLLM servers.")
session_app = typer.Typer(no_args_is_help=True, help="Conversations, and what became of their turns.")
app.add_typer(session_app, name="session")
app.add_typer(key_app, name="key")
app.add_typer(engine_app, name="engine")
app.add_typer(adapter_app, name="adapter")
app.add_typer(demo_app, name="demo")
app.add_typer(worker_app, name="worker")
app.add_typer(training_app, name="training")
app.add_typer(policy_app, name="policy")
app.add_typer(recipe_app, name="recipe")
app.command("check")(check_command)
app.command("erase")(erase_command)
app.add_typer(judge_app, name="judge")


@app.callback()
def clawloop() -> None:
    """A personal agent's model that gets better by being used."""


def _prepare_for_up() -> Prepare:
    from clawloop.processes.bootstrap import prepare
    from clawloop.processes.runtime_file import Running, installation, write_running

    async def ready(around: Surroundings) -> dict[str, str]:
        write_running(around.data, Running(around.database_url, around.temporal_address))
        return await prepare(
            around.database_url,
            around.base_model,
            around.aliases,
            around.engines,
            around.keys,
            added_by=installation(around.data),
            recipe=around.recipe,
            max_lora_rank=around.max_lora_rank,
        )

    return ready


app.command("up")(up_command(lambda: settings_of(None), _prepare_for_up))
demo_app.command("run")(run_command(lambda: settings_of(None), _prepare_for_up))
demo_app.command("report")(report_command)
demo_app.command("chat")(chat_command(lambda: settings_of(None)))


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A name clients may address it by.")] = None,
    data: Data = None,
) -> None:
    """Serve the OpenAI-compatible API."""
    from clawloop.local.checks import choose_port, require_folder

    settings = settings_of(data)
    require_folder(settings.data)
    chosen = choose_port("the gateway", host, port, "--port")
    # Seconds of imports: what is wrong is said before.
    from clawloop.processes.gateway import GatewayOptions, run_gateway
    from clawloop.telemetry.logs import configure_logging

    configure_logging()
    options = GatewayOptions(host=host, port=chosen, allowed_hosts=frozenset(allowed_host or ()))
    asyncio.run(run_gateway(settings, options))


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
    from clawloop.processes.bootstrap import begin
    from clawloop.processes.endpoints import database_url
    from db.schema import migrate as bring_to_head

    if base_model is None and (alias or engine):
        raise typer.BadParameter("needs --base-model", param_hint="--alias" if alias else "--engine")
    url = database_url(settings_of(data))
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
    from clawloop.contracts.serving import Scope
    from db.serving.keys import PostgresKeyStore

    try:
        scopes = frozenset(Scope(word) for word in scope or ["chat"])
    except ValueError as error:
        raise typer.BadParameter(f"{error}: use chat or admin", param_hint="--scope") from None
    _, secret = with_database(data, lambda database: PostgresKeyStore(database).create_key(policy, scopes, name))
    typer.echo(json.dumps({"key": secret, "scopes": sorted(scopes)}) if as_json else secret)


@key_app.command("list")
def list_keys(data: Data = None, as_json: AsJson = False) -> None:
    """Show the keys, without their secrets."""
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
    prefix: Annotated[str, typer.Argument(help="The key's public part, as `key list` shows it.")],
    data: Data = None,
) -> None:
    """End a key. Gateways stop taking it within 30 s."""
    from db.serving.keys import PostgresKeyStore

    if not with_database(data, lambda database: PostgresKeyStore(database).revoke(prefix)):
        fail(f"no key {prefix!r} that is still good; `clawloop key list` shows them")
    typer.echo(f"{prefix} is revoked.")


@engine_app.command("list")
def list_engines(data: Data = None, as_json: AsJson = False) -> None:
    """Show the engines."""
    from db.serving import engines

    found = with_database(data, engines.list_engines)
    rows = [
        {
            "id": engine.id,
            "url": engine.url,
            "draining": str(engine.draining).lower(),
            "versions": " ".join(f"{policy}-v{n}" for policy, ns in engine.versions.items() for n in sorted(ns)),
            "problem": engine.problem or "",
        }
        for engine in found
    ]
    show_rows(rows, as_json)


@engine_app.command("add")
def add_engine(url: Annotated[str, typer.Argument(help="e.g. http://127.0.0.1:8101")], data: Data = None) -> None:
    """Let gateways send requests to one more vLLM server."""
    from db.serving import engines

    engine = with_database(data, lambda database: engines.add_engine(database, url))
    typer.echo(f"{engine.id} is {engine.url}.")


@engine_app.command("drain")
def drain_engine(
    engine_id: Annotated[str, typer.Argument(help="As `engine list` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    data: Data = None,
) -> None:
    """Send an engine no new requests."""
    from db.serving import engines

    if not with_database(data, lambda database: engines.drain_engine(database, engine_id, not undo)):
        fail(f"no engine {engine_id!r}; `clawloop engine list` shows them")
    typer.echo(f"{engine_id} takes requests again." if undo else f"{engine_id} takes no new requests.")


@engine_app.command("remove")
def remove_engine(
    engine_id: Annotated[str, typer.Argument(help="As `engine list` shows it.")], data: Data = None
) -> None:
    """Forget an engine. Drain it first: replies it is giving are not waited for."""
    from db.serving import engines

    if not with_database(data, lambda database: engines.remove_engine(database, engine_id)):
        fail(f"no engine {engine_id!r}; `clawloop engine list` shows them")
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
    from clawloop.cli.formatting import session_row
    from clawloop.contracts.sessions import SessionState
    from db.turns.sessions import PostgresSessionStore

    try:
        wanted = None if state is None else SessionState(state)
    except ValueError:
        raise typer.BadParameter(f"{state!r}: use {', '.join(SessionState)}", param_hint="--state") from None
    sessions = with_database(
        data,
        lambda database: PostgresSessionStore(database).sessions(policy=policy, state=wanted, after=None, limit=limit),
    )
    show_rows([session_row(session) for session in sessions], as_json)


@session_app.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help="As `session list` shows it.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a session's turns, each with what became of it and why."""
    from clawloop.cli.formatting import turn_row
    from db.turns.sessions import PostgresSessionStore

    wanted = _uuid(session, "session")
    turns = with_database(data, lambda database: PostgresSessionStore(database).turns(wanted))
    if not turns:
        fail(f"no session {session!r}; `clawloop session list` shows them")
    show_rows([turn_row(turn) for turn in turns], as_json)


@app.command()
def why(
    turn: Annotated[str, typer.Argument(metavar="ID", help="A reply's id (chatcmpl-…) or a turn's.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Say what became of one reply, and why."""
    from clawloop.cli.formatting import turn_facts
    from clawloop.contracts.views import TurnView
    from clawloop.ids import turn_id_of
    from db.turns.sessions import PostgresSessionStore

    turn_id = turn_id_of(turn)

    async def look(database: Database) -> TurnView | None:
        store = PostgresSessionStore(database)
        session = None if turn_id is None else await store.session_of(turn_id)
        turns = [] if session is None else await store.turns(session)
        return next((view for view in turns if view.id == turn_id), None)

    found = with_database(data, look)
    if found is None:
        fail(f"no reply {turn!r} is stored")
        return
    facts = turn_facts(found)
    show_facts(facts, as_json)


def main() -> None:
    """Run a verb; what goes wrong is one line on standard error."""
    run_and_exit(run_verb)


def run_verb() -> None:
    """What `main` does, for a process that goes on: what went wrong is said, then SystemExit."""
    try:
        check_install()
        app()
    except ClawloopError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        reason = missing_extra(error)
        if reason is None:
            raise
        fail(reason)
    except KeyboardInterrupt:
        sys.exit(130)


def _uuid(text: str, what: str) -> SessionId:
    from uuid import UUID

    try:
        return cast("SessionId", UUID(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no {what} id") from None


if __name__ == "__main__":
    main()
