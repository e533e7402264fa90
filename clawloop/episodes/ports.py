"""Ports of an environment's worker."""

from __future__ import annotations

from typing import Protocol

from clawloop.contracts.episodes import AgentRun
from clawloop.ids import EpisodeId


class EpisodeKeys(Protocol):
    async def key_of(self, episode: EpisodeId) -> str:
        """The key of a running episode, for its agent that starts now.

        Raises:
            EpisodeUnusable: there is no such episode, it has ended, or an agent has used its key already: what that one
                did is unknown, and no second agent continues it.
            StoreUnavailable
        """


class EpisodeRunner(Protocol):
    """Runs agents and verifiers, each in a sandbox of its own that is gone afterwards.

    All raise EpisodeUnusable if there is no such environment or task, and SandboxFailed if the sandbox itself did not
    work.
    """

    async def require_usable(self, environment: str, task_id: str) -> None:
        """Check a task before its first agent starts, where its environment does not answer for it.

        Raises:
            TaskUnusable: its rewards cannot be trusted.
        """

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        """Let the agent work on the task until it ends, or its limit is reached."""

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        """The reward for what an agent left, or None and why there is none."""


class Artifacts(Protocol):
    """Artifacts that agents left, by digest."""

    async def store(self, artifact: bytes) -> str:
        """The artifact's SHA-256 in hex. Idempotent."""

    async def load(self, sha256: str) -> bytes:
        """
        Raises:
            EpisodeUnusable: the artifact is missing or damaged.
        """
