"""Parts shared by verbs: options, failures, a database for one call, tables, ages and JSON."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from clawloop.core.errors import ValueRejected

if TYPE_CHECKING:
    from clawloop.core.contracts.training import StepProgress
    from clawloop.core.settings import Settings
    from db.database import Database


# Output ---------------------------------------------------------------------------------------------------------------
# Prints tables, ages and JSON. Lists fit the terminal: only their last column is ever cut, never an id.
#
# Texts of models and users may hold control characters, which would move the cursor or change the terminal.

_GAP = "  "
_LEAST_LAST = 12
# Longer lines of prose are hard to read.
_WIDEST = 100
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def show_json(answer: object) -> None:
    """Print a model or a dataclass as the REST API returns it."""
    from pydantic import TypeAdapter

    typer.echo(TypeAdapter(type(answer)).dump_json(answer).decode())


def show_table(rows: Sequence[dict[str, str]], none: str = "nothing yet") -> None:
    """Print rows with the same keys, or `none`; the last column takes the remaining width."""
    if not rows:
        typer.echo(none)
        return
    from rich.cells import cell_len, set_cell_size

    lines = [tuple(rows[0]), *(tuple(printable(cell).replace("\n", " ") for cell in row.values()) for row in rows)]
    *fixed, _ = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    left = terminal_width()
    room = None if left is None else max(_LEAST_LAST, left - sum(fixed) - len(_GAP) * len(fixed))
    for *cells, last in lines:
        begin = "".join(set_cell_size(cell, width) + _GAP for cell, width in zip(cells, fixed, strict=True))
        if room is not None and cell_len(last) > room:
            last = set_cell_size(last, room - 1).rstrip() + "…"
        typer.echo(f"{begin}{last}".rstrip())


def show_facts(facts: dict[str, str]) -> None:
    """Print one label and value a line."""
    width = max(10, *(len(name) for name in facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}} {printable(value)}")


def wrapped(text: str, indent: str) -> Iterator[str]:
    """The lines of a text that models or users may have written, as wide as the terminal or a page."""
    width = min(_WIDEST, terminal_width() or _WIDEST)
    for line in printable(text).splitlines() or [""]:
        yield from textwrap.wrap(
            line, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
        ) or [""]


def terminal_width() -> int | None:
    """Columns of the terminal, or of COLUMNS; None where the output goes to a file or another program."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def printable(text: str) -> str:
    """The text without control characters, but for tabs and line ends."""
    return text.translate(_CONTROL)


def age(moment: datetime | None) -> str:
    """The age of a moment in one unit: `5 min`; "" for None."""
    if moment is None:
        return ""
    return duration((datetime.now(UTC) - moment).total_seconds())


def duration(seconds: float) -> str:
    """A duration in one unit, e.g. `5 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def doing(progress: StepProgress | None) -> str:
    """Current activity of training, its duration and speed, and the time left; "" for none."""
    if progress is None:
        return ""
    parts = [progress.now]
    if progress.seconds is not None:
        parts.append(f"for {duration(progress.seconds)}")
    if progress.tokens_a_second is not None:
        parts.append(f"{progress.tokens_a_second:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"about {duration(progress.seconds_left)} left")
    return ", ".join(parts)


def when(moment: datetime | None) -> str:
    """ISO 8601 in seconds; "" for None."""
    return "" if moment is None else moment.isoformat(timespec="seconds")


# Calls ----------------------------------------------------------------------------------------------------------------
# Options that verbs share, a database for the length of one call, and failures.

Result = TypeVar("Result")
# Verbs that change nothing.
_READING = frozenset(
    {"check", "compare", "events", "export", "groups", "liked", "list", "openclaw-config", "precision", "replay",
     "show", "status", "version", "versions", "why"}
)  # fmt: skip
_verb: ContextVar[str | None] = ContextVar("verb", default=None)


def _note_verb(context: typer.Context, data: Path | None) -> Path | None:
    context.call_on_close(partial(_verb.reset, _verb.set(context.info_name)))
    return data


Data = Annotated[
    Path | None,
    typer.Option("--data", callback=_note_verb, help="Folder of everything that survives a restart."),
]
Policy = Annotated[
    str | None,
    typer.Option(help="The policy; without it the only one with sessions, else `default`.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_of(data: Path | None) -> Settings:
    """The settings, with `--data` over CLAWLOOP_DATA."""
    from clawloop.core.settings import read_settings

    settings = read_settings()
    return settings if data is None else settings.model_copy(update={"data": data})


def running_settings(data: Path | None) -> Settings:
    """The settings of a command that asks or changes what runs: without `--data` of the instance that runs, which is
    named on standard error where it is not the one of the settings, or not the only one.

    Raises:
        SetupError: several run, and the command writes.
    """
    from clawloop.app.processes.endpoints import chosen_data

    settings = settings_of(data)
    if data is not None:
        return settings
    found, is_named = chosen_data(settings, reads=_verb.get() in _READING)
    if is_named:
        _name_once(found)
    return settings if found == settings.data else settings.model_copy(update={"data": found})


@cache
def _name_once(data: Path) -> None:
    typer.echo(f"clawloop: using the instance in {data}", err=True)


def checked_reason(reason: str) -> str:
    """A reason that operations take."""
    from clawloop.operations.training import check_reason

    try:
        return check_reason(reason)
    except ValueRejected as error:
        raise typer.BadParameter(str(error), param_hint="REASON") from None


def with_database(data: Path | None, work: Callable[[Database], Coroutine[Any, Any, Result]]) -> Result:
    """Run `work` on a connection pool that is closed afterwards."""
    from clawloop.app.processes.database import open_database

    settings = running_settings(data)

    async def run() -> Result:
        database = open_database(settings)
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run())


def with_policy(
    data: Path | None, policy: str | None, work: Callable[[Database, str], Coroutine[Any, Any, Result]]
) -> Result:
    """Run `work` with the policy; without `--policy` with the one in use, named on standard error unless `default`."""

    async def run(database: Database) -> Result:
        if policy is not None:
            return await work(database, policy)
        from db.overview import PostgresOverviewStore

        found = await PostgresOverviewStore(database).policy_in_use()
        if found != "default":
            typer.echo(f"clawloop: policy {found}, the only one with chats", err=True)
        return await work(database, found)

    return with_database(data, run)


def fail(reason: str) -> NoReturn:
    """Print the reason to standard error and exit with code 1."""
    typer.echo(f"clawloop: {reason}", err=True)
    sys.exit(1)
