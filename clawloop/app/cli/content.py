"""`clawloop export`, `erase` and `encryption`: what is stored of conversations."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO
from uuid import UUID

import typer

from clawloop.app.cli.operations import with_operations
from clawloop.app.cli.session import SESSION_HELP, TURN_HELP
from clawloop.app.cli.terminal import AsJson, Data, fail, printable, running_settings, show_json, with_database

if TYPE_CHECKING:
    from clawloop.app.processes.database import Reencrypted
    from clawloop.app.processes.operations import Operations
    from clawloop.core.contracts.sessions import Erasure
    from clawloop.core.contracts.views import SessionView, TurnView
    from clawloop.core.ids import SessionId, TurnId
    from clawloop.operations.applied import Applied
    from clawloop.operations.reading import Reading
    from db.database import Database


# Export ---------------------------------------------------------------------------------------------------------------
# `clawloop export`: recorded data, one JSON object a line. Heavy imports happen inside the verb.

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"]


def export(
    records: Annotated[
        str, typer.Option(help="turns, judgements, chat, openai, preference, samples, steps or lessons.")
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

    async def write(database: Database, file: BinaryIO) -> int:
        written = 0
        exporter = Exporter(PostgresExportStore(database))
        async for page in exporter.pages(ExportKind(records), wanted, after, with_files=files):
            for record in page:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            written += len(page)
        return written

    if out is None:
        with_database(data, lambda database: write(database, sys.stdout.buffer))
        return
    with out.open("ab") as file:
        written = with_database(data, lambda database: write(database, file))
    typer.echo(f"{records} written to {out}: {written:,}{'' if after is None else ' more'}", err=True)


def _find(data: Path | None, session: str) -> SessionId:
    return with_operations(data, lambda operations: operations.reading.references.session(session))


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


# Erase ----------------------------------------------------------------------------------------------------------------
# `clawloop erase`: erases content for good. Heavy imports happen inside the verb.


def erase_command(
    session: Annotated[str | None, typer.Option(help=f"Erase this session. {SESSION_HELP}")] = None,
    turn: Annotated[
        str | None,
        typer.Option(help=f"Erase this turn, its request, and all turns that continue it. {TURN_HELP}"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Erase content, for good. Ids, verdicts and hashes remain, and so does what steps have learned."""
    if (session is None) == (turn is None):
        raise typer.BadParameter("give one of --session and --turn", param_hint="--session")
    of_session, of_turn = with_operations(data, lambda operations: _find_erased(operations.reading, session, turn))
    session_id, turn_id = of_session.id, None if of_turn is None else of_turn.id
    what = f"session {session_id}" if turn_id is None else f"turn {turn_id} and what continues it"
    if of_session.title is not None:
        what += f" ({printable(of_session.title)!r})"
    if not yes:
        typer.confirm(f"Erase {what}? This cannot be undone.", abort=True, err=True)
    applied = with_operations(data, lambda operations: _erase(operations, session_id, turn_id))
    erasure = applied.result
    if as_json:
        from clawloop.core.contracts.answers import ContentGone

        show_json(ContentGone.of(erasure, workflow_told=applied.signal_error is None))
        return
    typer.echo(_summary(erasure))
    if applied.signal_error is not None:
        typer.echo(f"Temporal shows the turns as they were; signal failed: {applied.signal_error}", err=True)


async def _find_erased(reading: Reading, session: str | None, turn: str | None) -> tuple[SessionView, TurnView | None]:
    """
    Raises:
        NotFound, AmbiguousId, StoreUnavailable
    """
    view = None if turn is None else await reading.turn(turn)
    found = await reading.session(str(session) if view is None else str(view.session_id), limit=1)
    return found.session, view


async def _erase(operations: Operations, session_id: SessionId, turn_id: TurnId | None) -> Applied[Erasure]:
    sessions = operations.sessions
    applied = await (sessions.erase_session(session_id) if turn_id is None else sessions.erase_turn(turn_id))
    assert applied is not None  # rows without content stay for good
    return applied


def _summary(erasure: Erasure) -> str:
    if not erasure.turns:
        return "All of it was erased before."
    summary = f"{_count(erasure.turns, 'turn')} erased."
    if erasure.expired:
        summary += f" {_count(erasure.expired, 'sample')} that waited for a step expired."
    if erasure.learned:
        summary += (
            f" Steps have trained, or are training, {_count(erasure.learned, 'sample')} of it, which stay in their"
            " versions (`clawloop policy roll-back` goes back before them)."
        )
    return summary


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# Encryption -----------------------------------------------------------------------------------------------------------
# `clawloop encryption`: the keys that encrypt conversations at rest. Heavy imports happen inside a verb.

encryption_app = typer.Typer(no_args_is_help=True, help="Encryption of conversations at rest.")


@encryption_app.callback()
def encryption() -> None:
    """Encryption of conversations at rest."""


@encryption_app.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="The file of keys, for CLAWLOOP_ENCRYPTION_KEY_FILE.")],
    add: Annotated[bool, typer.Option("--add", help="Put a new key before the others, which still decrypt.")] = False,
) -> None:
    """Make a file with a new key. Keep a copy elsewhere: without the file, encrypted content cannot be read."""
    from clawloop.core.encryption.key_file import SETTING, add_key, make_keys

    if add:
        typer.echo(
            f"{file} has {add_key(file)} keys. Processes that read this file encrypt with the new one from now on;"
        )
        typer.echo(
            "copy it to where others read it. Then run `clawloop encryption rotate`, and remove the old ones when it"
        )
        typer.echo("has nothing left to do.")
        return
    make_keys(file)
    typer.echo(f"{file} has a key. Keep a copy elsewhere: without the file, encrypted content cannot be read.")
    typer.echo(f"To use it, start all processes with {SETTING}={file.absolute()}")


@encryption_app.command("rotate")
def rotate_keys(
    decrypt: Annotated[
        bool, typer.Option("--decrypt", help="Store all as plain content. Stop everything first.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Encrypt all stored content by the first key of the file, also while everything runs. Can be interrupted."""
    from clawloop.app.processes.database import reencrypt
    from clawloop.core.encryption.key_file import SETTING

    settings = running_settings(data)
    if settings.encryption_key_file is None:
        fail(f"nothing is encrypted without keys: set {SETTING}")

    def tell(table: str, rows: int) -> None:
        if not as_json:
            typer.echo(f"{table}: {rows} rows", err=True)

    done = asyncio.run(reencrypt(settings, decrypt=decrypt, told=tell))
    if as_json:
        typer.echo(json.dumps({"rows": done.rows, "files": done.files, "unreadable": done.unreadable}))
    else:
        _report(done, decrypt=decrypt)
    if done.unreadable:
        sys.exit(1)


def _report(done: Reencrypted, *, decrypt: bool) -> None:
    from clawloop.core.encryption.key_file import SETTING

    what = "decrypted" if decrypt else "encrypted by the first key"
    typer.echo(f"{sum(done.rows.values())} rows and {done.files} files {what}.")
    for place in done.unreadable:
        typer.echo(f"left as it is: {place}")
    if decrypt and not done.unreadable:
        typer.echo(f"The database takes plain content now: start everything without {SETTING}.")
