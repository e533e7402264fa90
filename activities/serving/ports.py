"""Ports of serving.

Every method of a store is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
RecordUnusable if the policy, version or engine does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.adapter_directory import AdapterDirectory
from clawloop.contracts.serving import Engine
from clawloop.contracts.training import VersionRef


class PublishingStore(Protocol):
    """Stores which versions engines should have and have loaded, and which one is active."""

    async def engines(self) -> list[Engine]:
        """All engines with their loaded versions."""

    async def wanted(self, engine_id: str) -> list[VersionRef]:
        """The versions this engine should have: head, active and pinned one of each policy, oldest first."""

    async def loaded(self, engine_id: str, policy: str, n: int) -> None:
        """Record that the engine has loaded a version. Idempotent."""

    async def unloaded(self, engine_id: str, policy: str, n: int) -> None:
        """Record that the engine has unloaded a version. Idempotent."""

    async def forget(self, engine_id: str) -> None:
        """Record that the engine has lost all its versions: only the base model is routed there."""

    async def report(self, engine_id: str, problem: str | None) -> None:
        """Record why the engine is out of rotation; None: it works."""

    async def activate(self, policy: str, n: int, epoch: int) -> bool:
        """Make version `n` the active one and notify gateways; False if that is not permitted.

        Permitted is a version that an engine in rotation has loaded, within the same epoch and while no other version
        is pinned. It must be on the path to the head, and newer than the active version if that is on the path too.
        """

    async def unloadable(self, engine_id: str, age: timedelta) -> list[VersionRef]:
        """The engine's loaded versions that are not wanted and were neither active nor loaded within `age`."""

    async def removable(self, age: timedelta) -> list[VersionRef]:
        """Versions whose files can be removed.

        They were created and retired longer than `age` ago, are on no engine, not wanted and not among the newest of
        the path. No claimed step starts from them; they answered no waiting turn and no waiting sample with a hint.
        """

    async def mark_removed(self, policy: str, n: int, age: timedelta) -> bool:
        """Record that a version's files are removed; False if it is not removable any more."""

    async def has_files_at(self, path: str) -> bool:
        """Whether a version whose files are not removed has them here: policies may share a directory."""

    async def leftover(self, directories: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
        """Those directories whose step has ended and whose path no version has.

        A late attempt needs its step's row to be claimed, so this needs no age. Directories of unknown steps belong to
        another installation and are not returned.
        """


class AdapterFiles(Protocol):
    async def are_here(self) -> bool:
        """Whether this machine has the adapters folder."""

    async def free_bytes(self) -> int:
        """Of the disk they are on."""

    async def directories(self) -> list[AdapterDirectory]:
        """The finished adapter directories on this machine, and those whose removal was interrupted."""

    async def remove(self, path: str) -> bool:
        """Delete a version's directory, if it exists. False if this machine does not have the adapters folder.

        Args:
            path: as in `VersionRef`.

        Raises:
            AdapterUnusable: the directory cannot be deleted.
        """


class EngineControl(Protocol):
    """Controls one vLLM engine. Every method raises EngineUnavailable if the engine does not answer."""

    async def load(self, version: VersionRef, name: str) -> None:
        """Load a version under `name`, and check that it generates one token.

        Raises:
            EngineRejected: the engine cannot load it.
            AdapterUnusable: the files are not those of the version.
            AdapterUnreadable: the files cannot be read now.
        """

    async def unload(self, name: str) -> None: ...

    async def names(self) -> frozenset[str]:
        """Names of the loaded adapters."""

    async def running(self) -> frozenset[str]:
        """Names of the adapters with running or waiting requests."""

    async def slots(self) -> int:
        """Number of adapters whose requests can run at once; requests of further adapters wait."""

    async def healthy(self) -> bool:
        """Whether the engine is healthy. Raises EngineUnavailable only on a timeout, which a busy engine may cause."""
