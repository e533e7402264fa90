"""Records of rollout groups and episodes, which also cross Temporal: ids, scores and reasons, never text of a
conversation.

Open workflows and saved histories hold them: new fields must be optional.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from clawloop.core.ids import EpisodeId, RolloutGroupId, SessionId

# A sum of weights that should be 1 may be 1 + 2^-52.
_ROUNDED = 1e-6


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The numbers that a verifier may write. An episode's reward is what was written as a share of this range, 0 to 1.

    Raises:
        ValueError: the range is empty, or without an end.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"{self.low:g} to {self.high:g} is no range of rewards: the second number must be larger")

    def place(self, number: float) -> float:
        """0 at the range's lower end, 1 at its upper end; a number outside of it is below 0 or above 1."""
        return (number - self.low) / (self.high - self.low)

    def share(self, written: float) -> float:
        """`place` of a reward.

        Raises:
            ValueError: it is not finite, or outside the range by more than rounding.
        """
        if not math.isfinite(written):
            raise ValueError("reward is not finite")
        share = self.place(written)
        if not -_ROUNDED <= share <= 1 + _ROUNDED:
            raise ValueError(f"reward {written:g} is not between {self.low:g} and {self.high:g}")
        return min(1.0, max(0.0, share))


UNIT_RANGE = RewardRange()


class GroupState(StrEnum):
    """State of a rollout group."""

    OPEN = "open"  # its episodes run, or wait for their verifier
    SETTLED = "settled"  # its episodes have their advantages
    DROPPED = "dropped"  # too few of its episodes have a reward


class EpisodeState(StrEnum):
    """State of an episode."""

    RUNNING = "running"
    ENDED = "ended"  # its agent ended; its verifier has not answered yet
    SCORED = "scored"  # it has a reward
    UNSCORED = "unscored"  # its verifier gave none, which is not a reward of 0
    ABANDONED = "abandoned"  # lost with its sandbox, or replaced by another attempt


class Ending(StrEnum):
    """An episode's ending. All but `infrastructure` are verified and trained."""

    COMPLETED = "completed"  # the agent says that it is done
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TIME = "truncated_time"
    AGENT_ERROR = "agent_error"  # the agent's program failed
    INFRASTRUCTURE = "infrastructure"  # sandbox, engine or worker failed: tried again in a new sandbox


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A rollout group to be made.

    Args:
        environment: name of the environment that has the task.
        task: the task's id in it.
        size: number of episodes.
    """

    id: RolloutGroupId
    policy: str
    environment: str
    task: str
    size: int


@dataclass(frozen=True, slots=True)
class EpisodeBegun:
    """The episode at a place of a group.

    Args:
        place: which of the group's episodes it is, from 0.
        attempt: from 1; a lost attempt is never continued, the next one is another episode.
        state: `running` if it was begun now, or may not have run yet; another if the workflow that began it was lost.
        artifact_sha256: digest in hex of what its agent left; None if it has not ended, or nothing was kept.
    """

    id: EpisodeId
    group: RolloutGroupId
    place: int
    attempt: int
    state: EpisodeState = EpisodeState.RUNNING
    artifact_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeScore:
    """
    Args:
        reward: None if the verifier gave none.
        reason: for people, without text of the conversation.
    """

    episode: EpisodeId
    reward: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """
    Args:
        reason: for people, without text of the conversation.
        artifact_sha256: digest in hex of what the agent left; None if nothing was kept.
        score: where it came with the agent's end; None: the verifier gives it.
    """

    id: EpisodeId
    ending: Ending
    reason: str = ""
    artifact_sha256: str | None = None
    score: EpisodeScore | None = None


@dataclass(frozen=True, slots=True)
class GroupBegun:
    """A rollout group whose episodes begin.

    Args:
        judged: the policy's recipe adds votes on each turn to the outcome.
        episodes: by place, its first attempt, or what has ended there; none if the group is not open.
    """

    policy: str
    environment: str
    task: str
    size: int
    state: GroupState
    judged: bool
    episodes: Sequence[EpisodeBegun] = ()


@dataclass(frozen=True, slots=True)
class AgentRun:
    """
    Args:
        reason: for people, without text of the conversation.
        artifact: what the agent left, as a tar archive; never crosses Temporal.
        verdict: the reward, None for none, and why there is none, where the agent's end is verified with it; None: its
            verifier has to be asked.
    """

    ending: Ending
    reason: str
    artifact: bytes
    verdict: tuple[float | None, str] | None = None


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of a rollout group.

    Args:
        scored: number of its episodes with a reward.
        mean_reward: over them; None without one. It tells the task's difficulty, also where nothing can be learned.
        samples: number of samples made.
    """

    id: RolloutGroupId
    state: GroupState
    scored: int
    mean_reward: float | None
    samples: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """A rollout group, for people."""

    id: RolloutGroupId
    policy: str
    environment: str
    task: str
    size: int
    state: GroupState
    reason: str | None
    scored: int | None
    mean_reward: float | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode, for people.

    Args:
        turns: number of its main turns.
        tokens: of their responses.
        trained: number of its turns that a committed step trained.
        sessions: what was said, in order of their first turns; a main agent and its side agents have one each.
    """

    id: EpisodeId
    group: RolloutGroupId
    policy: str
    environment: str
    task: str
    place: int
    attempt: int
    state: EpisodeState
    ending: Ending | None
    reward: float | None
    advantage: float | None
    reason: str | None
    artifact_sha256: str | None
    turns: int
    tokens: int
    trained: int
    started_at: datetime
    ended_at: datetime | None
    sessions: Sequence[SessionId] = ()


class RolloutsState(StrEnum):
    """State of a policy's rollouts."""

    RUNNING = "running"
    PAUSED = "paused"  # by a person, or because its groups gave no samples
    NEVER_STARTED = "never started"


@dataclass(frozen=True, slots=True)
class NextGroups:
    """Current state of a policy's rollouts.

    Args:
        running: False: they are paused, or were never started.
        open: all groups in flight, those that start now included.
        reason: what the rollouts wait for, or why they are paused.
    """

    running: bool
    open: list[RolloutGroupId]
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutsPlan:
    """Settings of a policy's rollouts.

    Args:
        size: episodes of a group.
        groups: groups in flight: as many episodes run at a time as these have, and up to `size - 1` more where workers
            have places for them.
        barren_limit: rollouts pause after this many groups in a row without a sample.
        curriculum: success decides which kinds of tasks are drawn, and how hard they are.
    """

    environment: str
    size: int
    groups: int
    barren_limit: int
    curriculum: bool = False


@dataclass(frozen=True, slots=True)
class KindView:
    """A kind of task in a policy's curriculum, for people.

    Args:
        level: how hard it is drawn now, 1 to `hardest`.
        weight: how often it is drawn, compared with others; 1 unless it teaches nothing.
        success: share of the newest episodes counted; None without any.
        scored: episodes counted since the last change, while it is not decided whether the next is due.
        needed: so many are counted before the next change, or before a change on trial is decided.
        trial_of: the level before a change that is on trial; None: none is.
        why: of the last change; empty if there was none.
    """

    kind: str
    level: int
    hardest: int
    weight: float
    success: float | None
    scored: int
    needed: int
    trial_of: int | None
    why: str


@dataclass(frozen=True, slots=True)
class RolloutsView:
    """A policy's rollouts, for people.

    Args:
        reason: why they are paused, what they wait for, or why the last group has no reward.
        plan: None if they were never started.
        in_flight: open groups.
        settled, dropped: finished groups.
        recent_reward: mean reward of the last 20 groups that have one.
        curriculum: by kind; empty without one.
        no_worker: that no worker serves the environment, and how to start one; empty if one does, or if unknown.
    """

    policy: str
    state: RolloutsState
    reason: str
    plan: RolloutsPlan | None
    in_flight: int
    settled: int
    dropped: int
    recent_reward: float | None
    curriculum: Sequence[KindView] = ()
    no_worker: str = ""
