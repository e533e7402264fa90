"""`clawloop import`: logs of OpenClaw-RL, and exports of Clawloop. Heavy imports happen inside the verb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.terminal import Data, with_database

if TYPE_CHECKING:
    from clawloop.operations.imports import Imported
    from db.database import Database

_CHUNK = 1024 * 1024


def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, metavar="FILE...", help="JSON lines, turns before judgements."),
    ],
    policy: Annotated[str, typer.Option(help="Which policy's they become.")] = "default",
    data: Data = None,
) -> None:
    """Import turns and judgements that OpenClaw-RL logged, or `clawloop export` wrote; again adds nothing."""
    from clawloop.operations.imports import Importer
    from db.imports import PostgresImportStore

    def report(name: str, line: int, reason: str) -> None:
        typer.echo(f"{name}:{line}: {reason}", err=True)

    async def run(database: Database) -> Imported:
        return await Importer(PostgresImportStore(database), policy, report).run(
            (str(file), _lines(file)) for file in files
        )

    done = with_database(data, run)
    typer.echo(f"Imported {done.turns} turns and {done.judgements} judgements; {done.known} were there already.")
    if done.unusable:
        typer.echo(f"{done.unusable} lines could not be used.", err=True)
        raise typer.Exit(1)


def _lines(file: Path) -> Iterator[bytes]:
    """The file's lines; of one that is too long to be used only its beginning."""
    from clawloop.turns.logged import LONGEST_LINE

    with file.open("rb") as opened:
        while line := opened.readline(LONGEST_LINE + 1):
            yield line
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := opened.readline(_CHUNK)) and not rest.endswith(b"\n"):
                    pass
