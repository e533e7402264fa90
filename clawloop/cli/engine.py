"""`clawloop engine`: the vLLM servers that gateways send requests to. Heavy imports happen inside a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from clawloop.cli.terminal import AsJson, Data, fail, settings_of, show_rows, with_database
from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.contracts.serving import Engine
    from db.database import Database

engine_app = typer.Typer(no_args_is_help=True, help="vLLM servers.")

EngineId = Annotated[str, typer.Argument(help="Id from `engine list`.")]


@engine_app.command("list")
def list_engines(data: Data = None, as_json: AsJson = False) -> None:
    """List the engines."""
    from db.serving import engines

    rows = [
        {
            "id": engine.id,
            "url": engine.url,
            "draining": str(engine.draining).lower(),
            "versions": " ".join(f"{policy}-v{n}" for policy, ns in engine.versions.items() for n in sorted(ns)),
            "problem": engine.problem or "",
        }
        for engine in with_database(data, engines.list_engines)
    ]
    show_rows(rows, as_json)


@engine_app.command("add")
def add_engine(
    url: Annotated[str, typer.Argument(help="e.g. http://127.0.0.1:8101")],
    require_guard: Annotated[
        bool, typer.Option("--require-guard", help="Refuse an engine that answers to anyone.")
    ] = False,
    data: Data = None,
) -> None:
    """Add a vLLM server that gateways may send requests to."""
    from clawloop.processes.endpoints import engine_secret
    from clawloop.processes.engine_check import check_engines
    from clawloop.serving.engine_check import answers_strangers
    from db.serving import engines

    settings = settings_of(data)

    async def check_and_add(database: Database) -> tuple[list[str], Engine]:
        address = engines.engine_of(url)[1]
        lines = await check_engines(database, [address], settings.model, engine_secret(settings))
        if await answers_strangers(address):
            unguarded = f"{address} answers to anyone who can reach it: start it with the engine guard"
            if require_guard:
                raise SetupError(f"{unguarded}, or leave out --require-guard")
            lines.append(f"{unguarded} (docs/operating.md, Access).")
        return lines, await engines.add_engine(database, url)

    silent, engine = with_database(data, check_and_add)
    for line in silent:
        typer.echo(line, err=True)
    typer.echo(f"{engine.id} is {engine.url}.")


@engine_app.command("drain")
def drain_engine(
    engine_id: EngineId,
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests again.")] = False,
    data: Data = None,
) -> None:
    """Send an engine no new requests."""
    from db.serving import engines

    if not with_database(data, lambda database: engines.drain_engine(database, engine_id, not undo)):
        _fail_unknown(engine_id)
    typer.echo(f"{engine_id} accepts requests again." if undo else f"{engine_id} gets no new requests.")


@engine_app.command("remove")
def remove_engine(engine_id: EngineId, data: Data = None) -> None:
    """Remove an engine. Drain it first: removal does not wait for running replies."""
    from db.serving import engines

    if not with_database(data, lambda database: engines.remove_engine(database, engine_id)):
        _fail_unknown(engine_id)
    typer.echo(f"{engine_id} is removed.")


def _fail_unknown(engine_id: str) -> NoReturn:
    fail(f"no engine {engine_id!r}; `clawloop engine list` shows them")
