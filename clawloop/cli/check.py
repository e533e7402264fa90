"""`clawloop check`: verifies the ledger's invariants and the hashes of the adapter files.

Heavy imports happen inside it.
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
    files: Annotated[bool, typer.Option(help="Also verify the hashes of the adapters in the data folder.")] = True,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Verify the ledger, also while everything runs. Exit code 1 if an invariant is violated."""
    from db.invariants import INVARIANTS, committed_versions, violations

    async def read(database: Database) -> tuple[list[Violation], list[VersionRef]]:
        return await violations(database), await committed_versions(database) if files else []

    violated, versions = with_database(data, read)
    violated += damaged_files(versions, settings_of(data).data / "adapters")
    if as_json:
        typer.echo(json.dumps([asdict(violation) for violation in violated]))
    else:
        for violation in violated:
            typer.echo(f"violated: {violation.invariant}: {violation.row}")
        if not violated:
            typer.echo(f"No violation of {len(INVARIANTS)} invariants, {len(versions)} adapters verified.")
    if violated:
        sys.exit(1)


def damaged_files(versions: Sequence[VersionRef], folder: Path) -> list[Violation]:
    """A violation for each version whose files are missing or have another hash.

    Args:
        folder: the data folder's `adapters`.
    """
    from clawloop.adapters.digest import check_version
    from clawloop.errors import AdapterUnusable
    from db.invariants import Violation

    damaged: list[Violation] = []
    for version in versions:
        try:
            check_version(folder / version.path, version.sha256)
        except AdapterUnusable as error:
            damaged.append(Violation(FILES, str(error)))
    return damaged
