"""`clawloop check`: whether the ledger is whole, and the files it names hold what it says.

Imports what is heavy only when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.terminal import AsJson, Data, settings_of, with_database

if TYPE_CHECKING:
    from clawloop.contracts.training import VersionRef
    from db.database import Database
    from db.invariants import Violation

FILES = "a committed version's files hold what its step made"


def check_command(
    files: Annotated[bool, typer.Option(help="Also hash the adapters in the data folder.")] = True,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Look for damage in the ledger; everything may run meanwhile. Exit code 1 if there is any."""
    from db.invariants import INVARIANTS, committed_versions, violations

    async def look(database: Database) -> tuple[list[Violation], list[VersionRef]]:
        return await violations(database), await committed_versions(database) if files else []

    found, versions = with_database(data, look)
    found += damaged_files(versions, settings_of(data).data / "adapters")
    if as_json:
        typer.echo(json.dumps([asdict(violation) for violation in found]))
    else:
        for violation in found:
            typer.echo(f"not so: {violation.invariant}: {violation.row}")
        if not found:
            typer.echo(f"The ledger is whole: {len(INVARIANTS)} rules, {len(versions)} adapters.")
    if found:
        sys.exit(1)


def damaged_files(versions: Sequence[VersionRef], folder: Path) -> list[Violation]:
    """Those of which the files are not there, or are others.

    Args:
        folder: the data folder's `adapters`.
    """
    from clawloop.adapters.digest import check_version
    from clawloop.errors import AdapterUnusable
    from db.invariants import Violation

    found: list[Violation] = []
    for version in versions:
        try:
            check_version(folder / version.path, version.sha256)
        except AdapterUnusable as error:
            found.append(Violation(FILES, str(error)))
    return found
