"""Messages of the activities of episodes: ids, scores and reasons. Later fields are optional."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from clawloop.contracts.episodes import Ending
from clawloop.ids import EpisodeId, RolloutGroupId

REASON_LIMIT = 300


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class BeginEpisode(_Message):
    group: RolloutGroupId
    place: int
    attempt: int


class RunEpisode(_Message):
    episode: EpisodeId
    environment: str
    task: str


class EpisodeRan(_Message):
    """
    Args:
        artifact_sha256: of what the agent left.
    """

    ending: Ending
    reason: str
    artifact_sha256: str | None = None


class VerifyEpisode(_Message):
    episode: EpisodeId
    environment: str
    task: str
    artifact_sha256: str


class ScoreEpisode(_Message):
    episode: EpisodeId
    reward: float | None
    reason: str = ""


class JudgeEpisode(_Message):
    episode: EpisodeId


class EpisodeJudged(_Message):
    """
    Args:
        turns: the episode's; judged: those with a valid vote.
    """

    turns: int
    judged: int


class EpisodeVerified(_Message):
    """
    Args:
        reward: None if the verifier gave none.
    """

    reward: float | None
    reason: str = ""
