"""The folder of artifacts as gateways and environment workers open it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

from clawloop.core.encryption.sealer import Sealer
from clawloop.core.settings import Settings
from clawloop.environments.artifacts import ArtifactFolder, prune_hourly


def open_artifacts(
    settings: Settings, sealer: Sealer | None, stack: AsyncExitStack, min_free_bytes: int = 0
) -> ArtifactFolder:
    """The folder; until the stack is closed, what is older than the settings say is deleted.

    Args:
        min_free_bytes: left free on its disk.
    """
    artifacts = ArtifactFolder(settings.data / "artifacts", sealer, min_free_bytes)
    pruning = asyncio.create_task(prune_hourly(artifacts, timedelta(days=settings.artifact_days)))
    stack.callback(pruning.cancel)
    return artifacts
