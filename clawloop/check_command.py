"""`clawloop check`: whether the ledger is whole, and the files it names hold what it says.

Imports what is heavy only when it runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clawloop.settings import Settings
    from db.invariants import Violation

FILES = "a committed version's files hold what its step made"


def check_command(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")
    ] = None,
    files: Annotated[bool, typer.Option(help="Also hash the adapters in the data folder.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look for damage in the ledger, while everything runs. Exit code 1 if there is any."""
    from clawloop.settings import Settings
    from db.invariants import INVARIANTS

    settings = Settings()
    found = asyncio.run(find(settings if data is None else settings.model_copy(update={"data": data}), files=files))
    if as_json:
        typer.echo(json.dumps([asdict(violation) for violation in found]))
    else:
        for violation in found:
            typer.echo(f"not so: {violation.invariant}: {violation.row}")
        if not found:
            typer.echo(f"{len(INVARIANTS) + files} things hold.")
    if found:
        sys.exit(1)


async def find(settings: Settings, *, files: bool) -> list[Violation]:
    """
    Args:
        files: compare the hashes of adapters too, below the data folder's `adapters`.

    Raises:
        SetupError, StoreUnavailable
    """
    from clawloop.processes import database_url
    from db.engine import BACKGROUND_LIMIT, Database
    from db.invariants import committed_versions, violations

    database = Database(database_url(settings), BACKGROUND_LIMIT)
    try:
        found = await violations(database)
        versions = await committed_versions(database) if files else []
    finally:
        await database.close()
    return found + _damaged([(version.path, version.sha256) for version in versions], settings.data / "adapters")


def _damaged(versions: list[tuple[str, str]], folder: Path) -> list[Violation]:
    if not versions:
        return []
    from clawloop.errors import AdapterUnusable
    from clawloop.training.adapter import check_version
    from db.invariants import Violation

    found: list[Violation] = []
    for path, sha256 in versions:
        try:
            check_version(folder / path, sha256)
        except AdapterUnusable as error:
            found.append(Violation(FILES, str(error)))
    return found
