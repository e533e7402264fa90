"""Options that verbs share, a database for the length of one call, and failures."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from clawloop.errors import ValueRejected

if TYPE_CHECKING:
    from clawloop.settings import Settings
    from db.database import Database

Result = TypeVar("Result")
Data = Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_of(data: Path | None) -> Settings:
    """The settings, with `--data` over CLAWLOOP_DATA."""
    from clawloop.settings import read_settings

    settings = read_settings()
    return settings if data is None else settings.model_copy(update={"data": data})


def checked_reason(reason: str) -> str:
    """A reason that operations take."""
    from clawloop.operations.reasons import check_reason

    try:
        return check_reason(reason)
    except ValueRejected as error:
        raise typer.BadParameter(str(error), param_hint="REASON") from None


def with_database(data: Path | None, work: Callable[[Database], Coroutine[Any, Any, Result]]) -> Result:
    """Run `work` on a connection pool that is closed afterwards."""
    from clawloop.processes.database import open_database

    async def run() -> Result:
        database = open_database(settings_of(data))
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run())


def fail(reason: str) -> NoReturn:
    """Print the reason to standard error and exit with code 1."""
    typer.echo(f"clawloop: {reason}", err=True)
    sys.exit(1)
