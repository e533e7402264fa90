"""One version with the samples it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clawloop.contracts.answers import VersionDetail
from clawloop.contracts.browsing import TrainedReply
from clawloop.contracts.training import VersionView
from clawloop.errors import NotFound


class VersionStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def versions(self, policy: str) -> list[VersionView]:
        """All versions; NotFound without such a policy."""


class BatchReader(Protocol):
    async def batch(self, policy: str, step: int) -> Sequence[TrainedReply]:
        """The samples of a step with their replies, in the batch's order."""


async def version_detail(versions: VersionStore, batches: BatchReader, policy: str, n: int) -> VersionDetail:
    """
    Raises:
        NotFound: there is no such policy or version.
        StoreUnavailable
    """
    known = await versions.versions(policy)
    shown = next((version for version in known if version.n == n), None)
    if shown is None:
        raise NotFound(f"Policy {policy!r} has no version {n}.", code="version_not_found", field="version")
    return VersionDetail(
        version=shown,
        children=[version.n for version in known if version.parent == n],
        batch=await batches.batch(policy, n),
    )
