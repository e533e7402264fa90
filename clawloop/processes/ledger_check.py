"""Verifies a database's ledger and the adapters in a data folder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from clawloop.adapters.digest import check_version
from clawloop.contracts.answers import Broken, CheckReport
from clawloop.contracts.training import VersionRef
from clawloop.errors import AdapterUnreadable, AdapterUnusable
from db.database import Database
from db.encryption.audit import audit
from db.invariants import INVARIANTS, committed_versions, violations

FILES = "a committed version's files hold what its step made"
ENCRYPTED = "content of an encrypted database is encrypted"
READABLE = "encrypted content can be decrypted"


class DatabaseCheck:
    """Satisfies `clawloop.operations.ledger.LedgerCheck`.

    Args:
        adapters: the data folder's `adapters`.
    """

    def __init__(self, database: Database, adapters: Path) -> None:
        self._database = database
        self._adapters = adapters

    async def report(self, *, files: bool) -> CheckReport:
        found = [Broken(invariant=one.invariant, row=one.row) for one in await violations(self._database)]
        found += await self._encryption(decrypt=files)
        versions = await committed_versions(self._database) if files else []
        found += await asyncio.to_thread(damaged_files, versions, self._adapters)
        return CheckReport(
            invariants=len(INVARIANTS) + 2 * self._database.content.is_on, adapters=len(versions), violations=found
        )

    async def _encryption(self, *, decrypt: bool) -> list[Broken]:
        found = await audit(self._database, decrypt=decrypt)
        plain = [
            f"{rows} rows of {table} are plain: `clawloop encryption rotate`" for table, rows in found.plain.items()
        ]
        return [Broken(invariant=ENCRYPTED, row=row) for row in plain] + [
            Broken(invariant=READABLE, row=row) for row in found.unreadable
        ]


def damaged_files(versions: Sequence[VersionRef], folder: Path) -> list[Broken]:
    """One for each version whose files are missing or have another hash.

    Args:
        folder: the data folder's `adapters`.
    """
    damaged: list[Broken] = []
    for version in versions:
        try:
            check_version(folder / version.path, version.sha256)
        except (AdapterUnusable, AdapterUnreadable) as error:
            damaged.append(Broken(invariant=FILES, row=str(error)))
    return damaged
