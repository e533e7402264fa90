"""`clawloop export`: recorded data, one JSON object a line. Heavy imports happen inside the verb."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO
from uuid import UUID

import typer

from clawloop.cli.operations import with_reading
from clawloop.cli.session import SESSION_HELP
from clawloop.cli.terminal import Data, fail, with_database

if TYPE_CHECKING:
    from clawloop.ids import SessionId
    from db.database import Database

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"]


def export(
    records: Annotated[
        str, typer.Option(help="turns, judgements, chat, openai, preference, samples or steps.")
    ] = "turns",
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    session: Annotated[str | None, typer.Option(help=f"Only of this session. {SESSION_HELP}")] = None,
    since: Annotated[datetime | None, typer.Option(formats=_TIMES, help="Not before this time, UTC.")] = None,
    until: Annotated[datetime | None, typer.Option(formats=_TIMES, help="Before this time, UTC.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Output file; an existing file is continued after its last line."),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="Messages with their images themselves in place of references.")
    ] = False,
    data: Data = None,
) -> None:
    """Print recorded data as JSON lines, oldest first, with the content of conversations."""
    from clawloop.operations.export import Exporter, ExportFilter, ExportKind
    from db.export import PostgresExportStore

    if records not in list(ExportKind):
        raise typer.BadParameter(f"use one of {', '.join(ExportKind)}", param_hint="--records")
    of_session = None if session is None else _find(data, session)
    wanted = ExportFilter(policy, of_session, _aware(since), _aware(until))
    after = None if out is None else _continue_after(out)

    async def write(database: Database, file: BinaryIO) -> None:
        exporter = Exporter(PostgresExportStore(database))
        async for page in exporter.pages(ExportKind(records), wanted, after, with_files=files):
            for record in page:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    if out is None:
        with_database(data, lambda database: write(database, sys.stdout.buffer))
        return
    with out.open("ab") as file:
        with_database(data, lambda database: write(database, file))


def _find(data: Path | None, session: str) -> SessionId:
    return with_reading(data, lambda reading: reading.references.session(session))


def _continue_after(out: Path) -> UUID | None:
    """The id in the last whole line of a file, which is cut after it; None without one."""
    if not out.exists():
        return None
    last: bytes | None = None
    whole = 0
    with out.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                last, whole = line, whole + len(line)
        file.truncate(whole)
    if last is None:
        return None
    try:
        return UUID(json.loads(last)["id"])
    except (ValueError, LookupError, TypeError):
        fail(f"{out} has lines that no export wrote: choose another file")


def _aware(moment: datetime | None) -> datetime | None:
    return moment if moment is None or moment.tzinfo is not None else moment.replace(tzinfo=UTC)
