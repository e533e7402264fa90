"""Messages through Temporal between a rollout group and its environment's worker: ids, scores and reasons.

Open workflows and saved histories hold them: new fields must be optional.
"""

from __future__ import annotations

from clawloop.contracts.episodes import Ending
from clawloop.contracts.message import Message
from clawloop.ids import EpisodeId

REASON_LIMIT = 300


def environment_queue(environment: str) -> str:
    """The queue of the workers that have this environment. Open workflows hold the value, so it never changes."""
    return f"environment-{environment}"


class RunEpisode(Message):
    episode: EpisodeId
    environment: str
    task: str


class VerifyEpisode(Message):
    episode: EpisodeId
    environment: str
    task: str
    artifact_sha256: str


class EpisodeVerified(Message):
    """
    Args:
        reward: None if the verifier gave none.
    """

    reward: float | None
    reason: str = ""


class EpisodeRan(Message):
    """
    Args:
        artifact_sha256: of what the agent left.
        verified: the verdict where it came with the agent's end; None: `verify_episode` gives it.
    """

    ending: Ending
    reason: str
    artifact_sha256: str | None = None
    verified: EpisodeVerified | None = None
