"""Messages of the activities of episodes on ledger and judge: ids, scores and reasons. Later fields are optional."""

from __future__ import annotations

from clawloop.contracts.episodes import EpisodeEnd
from clawloop.episodes.messages import Message
from clawloop.ids import EpisodeId, RolloutGroupId


class BeginEpisode(Message):
    group: RolloutGroupId
    place: int
    attempt: int


class ScoreEpisode(Message):
    """
    Args:
        end: of an episode that has not ended yet.
    """

    episode: EpisodeId
    reward: float | None
    reason: str = ""
    end: EpisodeEnd | None = None


class JudgeEpisode(Message):
    episode: EpisodeId


class EpisodeJudged(Message):
    """
    Args:
        turns: the episode's; judged: those with a valid vote.
    """

    turns: int
    judged: int
