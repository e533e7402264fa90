"""`clawloop import`: logs of OpenClaw-RL, and exports of Clawloop. Heavy imports happen inside the verb."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.show import show_json
from clawloop.cli.terminal import AsJson, Data, with_database

if TYPE_CHECKING:
    from clawloop.operations.imports import Imported
    from db.database import Database

_PIECE_BYTES = 1024 * 1024


def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, metavar="FILE...", help="JSON lines, turns before judgements."),
    ],
    policy: Annotated[str, typer.Option(help="Which policy's they become.")] = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Import turns and judgements that OpenClaw-RL logged, or `clawloop export` wrote; again adds nothing."""
    from clawloop.operations.imports import Importer, done_of
    from clawloop.turns.log_lines import log_lines
    from db.imports import PostgresImportStore

    problems: list[tuple[int, str]] = []

    def report(name: str, line: int, reason: str) -> None:
        problems.append((line, reason))
        typer.echo(f"{name}:{line}: {reason}", err=True)

    async def run(database: Database) -> Imported:
        return await Importer(PostgresImportStore(database), policy, report).run(
            (str(file), log_lines(_pieces(file))) for file in files
        )

    done = with_database(data, run)
    if as_json:
        show_json(done_of(done, problems))
    else:
        typer.echo(f"Imported {done.turns} turns and {done.judgements} judgements; {done.known} were there already.")
    if done.unusable:
        typer.echo(f"{done.unusable} lines could not be used.", err=True)
        raise typer.Exit(1)


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            yield piece
