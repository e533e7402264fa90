"""`clawloop engine`: the vLLM servers that gateways send requests to. Heavy imports happen inside a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.operations import with_operations
from clawloop.app.cli.terminal import AsJson, Data, fail, running_settings, show_json, show_table
from clawloop.core.errors import StateConflict

if TYPE_CHECKING:
    from clawloop.core.contracts.answers import EngineStatus
    from clawloop.operations.engines import EngineOperations

engine_app = typer.Typer(no_args_is_help=True, help="vLLM servers.")

EngineId = Annotated[str, typer.Argument(help="Id from `engine list`, its beginning, or a URL.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@engine_app.command("list")
def list_engines(data: Data = None, as_json: AsJson = False) -> None:
    """List the engines, and whether each answers."""
    engines = with_operations(data, lambda operations: operations.engines.list())
    if as_json:
        show_json(engines)
        return
    show_table([_row(engine) for engine in engines.engines])


@engine_app.command("add")
def add_engine(
    url: Annotated[str, typer.Argument(help="e.g. http://127.0.0.1:8101")],
    require_guard: Annotated[
        bool, typer.Option("--require-guard", help="Refuse an engine without authentication.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Add a vLLM server that gateways may send requests to."""
    added = with_operations(data, lambda operations: operations.engines.add(url, require_guard=require_guard))
    if as_json:
        show_json(added)
        return
    for line in added.warnings:
        typer.echo(line, err=True)
    typer.echo(f"{added.engine.id} is {added.engine.url}.")


@engine_app.command("renew-secret")
def renew_secret(
    finish: Annotated[
        bool, typer.Option("--finish", help="Remove the old secrets, which engines accepted until now.")
    ] = False,
    data: Data = None,
) -> None:
    """Put a new secret of the engines' guards before the old one, while everything runs."""
    from clawloop.app.local.keys_file import renew_engine_secret
    from clawloop.app.processes.endpoints import engine_secret_file

    settings = running_settings(data)
    path = settings.engine_secret_file or engine_secret_file(settings.data)
    if settings.engine_secret is not None:
        fail("CLAWLOOP_ENGINE_SECRET is fixed for each process: use CLAWLOOP_ENGINE_SECRET_FILE in its place")
    count = renew_engine_secret(path, finish=finish)
    if finish:
        typer.echo(f"Engines accept the first secret of {path} alone.")
    else:
        typer.echo(
            f"{path} has {count} secrets: the first is sent, engines accept all. End the old ones with --finish."
        )


@engine_app.command("drain")
def drain_engine(
    engine_id: EngineId,
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests again.")] = False,
    yes: Yes = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Send an engine no new requests; asks first if it is the only one that takes any."""

    async def drain(operations: EngineOperations) -> EngineStatus:
        try:
            return await operations.drain(engine_id, undo=undo, force=yes)
        except StateConflict as error:
            _confirm(error)
            return await operations.drain(engine_id, undo=undo, force=True)

    engine = with_operations(data, lambda operations: drain(operations.engines))
    if as_json:
        show_json(engine)
        return
    typer.echo(f"{engine.id} accepts requests again." if undo else f"{engine.id} gets no new requests.")


@engine_app.command("remove")
def remove_engine(engine_id: EngineId, yes: Yes = False, data: Data = None) -> None:
    """Remove an engine. Drain it first: removal does not wait for running replies."""

    async def remove(operations: EngineOperations) -> str:
        try:
            return await operations.remove(engine_id, force=yes)
        except StateConflict as error:
            _confirm(error)
            return await operations.remove(engine_id, force=True)

    typer.echo(f"{with_operations(data, lambda operations: remove(operations.engines))} is removed.")


def _confirm(error: StateConflict) -> None:
    typer.confirm(f"{error} Go on?", abort=True, err=True)


def _row(engine: EngineStatus) -> dict[str, str]:
    newest = [f"{policy}-v{versions[-1]}" for policy, versions in engine.versions.items() if versions]
    more = sum(len(versions) - 1 for versions in engine.versions.values() if versions)
    return {
        "id": engine.id,
        "health": "answers" if engine.healthy else "silent",
        "requests": "none" if engine.draining else "yes",
        "newest version": " ".join(newest) + (f" +{more}" if more else "") or "base model",
        "problem": engine.problem or "",
    }
