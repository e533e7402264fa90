"""Episodes in sandboxes: what crosses Temporal to their worker, what it needs, and its activities."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from temporalio import activity

from clawloop.core.contracts.episodes import AgentRun, EpisodeEnd, EpisodeScore
from clawloop.core.contracts.notices import Message
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import EpisodeId

# Messages -------------------------------------------------------------------------------------------------------------
# Messages through Temporal between a rollout group and its environment's worker: ids, scores and reasons.
#
# Open workflows and saved histories hold them: new fields must be optional.

REASON_LIMIT = 300


def environment_queue(environment: str) -> str:
    """The queue of the workers that have this environment. Open workflows hold the value, so it never changes."""
    return f"environment-{environment}"


class EpisodeWork(Message):
    """An episode whose agent is to run, or whose verifier.

    Args:
        artifact_sha256: of what its agent left, for the verifier; None: the agent is to run.
    """

    episode: EpisodeId
    environment: str
    task: str
    artifact_sha256: str | None = None


# Ports ----------------------------------------------------------------------------------------------------------------
# Ports of an environment's worker.


KeyOfEpisode = Callable[[EpisodeId], Awaitable[str]]
"""The key of a running episode, for its agent that starts now.

Raises:
    EpisodeUnusable: there is no such episode, it has ended, or an agent has used its key already: what that one did is
        unknown, and no second agent continues it.
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


# Activities -----------------------------------------------------------------------------------------------------------
# Episodes in sandboxes: one attempt of `run_episode` is one sandbox; `verify_episode` may be repeated.

log = logging.getLogger(__name__)


class EnvironmentActivities:
    """Activities of the queue `environment-{name}`, which run on the machine with the sandboxes."""

    def __init__(self, key_of: KeyOfEpisode, runner: EpisodeRunner, artifacts: Artifacts) -> None:
        self._key_of = key_of
        self._runner = runner
        self._artifacts = artifacts

    @activity.defn
    async def run_episode(self, work: EpisodeWork) -> EpisodeEnd:
        """Run the agent in a new sandbox; what it left is kept by its digest."""
        async with heartbeating(lambda: "the agent runs"):
            # Before the key is used, so that an attempt whose check fails has had no agent.
            await self._runner.require_usable(work.environment, work.task)
            key = await self._key_of(work.episode)
            run = await self._runner.run_agent(work.environment, work.task, work.episode, key)
            sha256 = await self._artifacts.store(run.artifact)
        log.info("episode ran", extra={"episode": str(work.episode), "ending": run.ending, "why": run.reason})
        score = None if run.verdict is None else _score(work.episode, *run.verdict)
        return EpisodeEnd(work.episode, run.ending, run.reason[:REASON_LIMIT], sha256, score)

    @activity.defn
    async def verify_episode(self, work: EpisodeWork) -> EpisodeScore:
        """Run the verifier on what the agent left, in a new sandbox; the agent does not run again.

        Raises:
            EpisodeUnusable: nothing that its agent left was kept.
        """
        async with heartbeating(lambda: "the verifier runs"):
            artifact = await self._artifacts.load(work.artifact_sha256 or "")
            reward, reason = await self._runner.verify(work.environment, work.task, work.episode, artifact)
        return _score(work.episode, reward, reason)


def _score(episode: EpisodeId, reward: float | None, reason: str) -> EpisodeScore:
    return EpisodeScore(episode, reward, reason[:REASON_LIMIT])
