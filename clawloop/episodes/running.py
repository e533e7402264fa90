"""Episodes in sandboxes: one attempt of `run_episode` is one sandbox; `verify_episode` may be repeated."""

from __future__ import annotations

import logging

from temporalio import activity

from clawloop.episodes.messages import REASON_LIMIT, EpisodeRan, EpisodeVerified, RunEpisode, VerifyEpisode
from clawloop.episodes.ports import Artifacts, EpisodeKeys, EpisodeRunner
from clawloop.heartbeat import heartbeating

log = logging.getLogger(__name__)


class EnvironmentActivities:
    """Activities of the queue `environment-{name}`, which run on the machine with the sandboxes."""

    def __init__(self, keys: EpisodeKeys, runner: EpisodeRunner, artifacts: Artifacts) -> None:
        self._keys = keys
        self._runner = runner
        self._artifacts = artifacts

    @activity.defn
    async def run_episode(self, request: RunEpisode) -> EpisodeRan:
        """Run the agent in a new sandbox; what it left is kept by its digest."""
        async with heartbeating(lambda: "the agent runs"):
            # Before the key is used, so that an attempt whose check fails has had no agent.
            await self._runner.require_usable(request.environment, request.task)
            key = await self._keys.key_of(request.episode)
            run = await self._runner.run_agent(request.environment, request.task, request.episode, key)
            sha256 = await self._artifacts.store(run.artifact)
        log.info("episode ran", extra={"episode": str(request.episode), "ending": run.ending, "why": run.reason})
        verified = None if run.verdict is None else _verified(*run.verdict)
        reason = run.reason[:REASON_LIMIT]
        return EpisodeRan(ending=run.ending, reason=reason, artifact_sha256=sha256, verified=verified)

    @activity.defn
    async def verify_episode(self, request: VerifyEpisode) -> EpisodeVerified:
        """Run the verifier on what the agent left, in a new sandbox; the agent does not run again."""
        async with heartbeating(lambda: "the verifier runs"):
            artifact = await self._artifacts.load(request.artifact_sha256)
            reward, reason = await self._runner.verify(request.environment, request.task, request.episode, artifact)
        return _verified(reward, reason)


def _verified(reward: float | None, reason: str) -> EpisodeVerified:
    return EpisodeVerified(reward=reward, reason=reason[:REASON_LIMIT])
