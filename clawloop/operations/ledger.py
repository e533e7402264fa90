"""Verifies the ledger's invariants, and that the adapters' files are those of their versions."""

from __future__ import annotations

from typing import Protocol

from clawloop.contracts.answers import CheckReport


class LedgerCheck(Protocol):
    async def report(self, *, files: bool) -> CheckReport:
        """A report of the broken invariants.

        Args:
            files: also compare the adapters' files with their hash.

        Raises:
            StoreUnavailable
        """
