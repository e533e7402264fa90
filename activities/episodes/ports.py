"""What the activities of episodes need from outside."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from clawloop.contracts.episodes import (
    AgentRun,
    EpisodeBegun,
    EpisodeEnd,
    GroupResult,
    GroupTask,
    NewGroup,
    NextGroups,
)
from clawloop.ids import EpisodeId, RolloutGroupId


class EpisodeKeys(Protocol):
    async def key_of(self, episode: EpisodeId) -> str:
        """The key of a running episode, for its agent that starts now.

        Raises:
            RecordUnusable: there is no such episode, it has ended, or an agent has used its key already: what that one
                did is unknown, and no second agent continues it.
            StoreUnavailable
        """


class EpisodeRunner(Protocol):
    """Runs agents and verifiers, each in a sandbox of its own that is gone afterwards.

    Both raise RecordUnusable if there is no such environment or task, and SandboxFailed if the sandbox itself did not
    work.
    """

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        """Let the agent work on the task until it ends, or its limit is reached."""

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        """The reward for what an agent left, or None and why there is none."""


class Artifacts(Protocol):
    """What agents left, by its digest."""

    async def store(self, artifact: bytes) -> str:
        """The artifact's SHA-256 in hex. Idempotent."""

    async def load(self, sha256: str) -> bytes:
        """
        Raises:
            RecordUnusable: it is not there, or damaged.
        """


class BatchNotifier(Protocol):
    async def notify(self, policy: str | None) -> None:
        """Notify training of a full batch, best effort; nothing for None."""


class RolloutStore(Protocol):
    async def next_groups(self, policy: str) -> NextGroups:
        """Insert the groups that the policy's rollouts start now: none while they or training are paused, or enough
        groups wait to be trained.

        After too many groups without a sample it pauses them, with the last reason.

        Raises:
            StoreUnavailable
        """


class EpisodeStore(Protocol):
    """The ledger of rollout groups. Every call is idempotent, and raises StoreUnavailable when PostgreSQL does not
    answer."""

    async def make_group(self, group: NewGroup) -> None:
        """Insert an open group.

        Raises:
            RecordUnusable: there is no such policy, or its size is below 2.
        """

    async def group_task(self, group: RolloutGroupId) -> GroupTask:
        """What the group's episodes have to do.

        Raises:
            RecordUnusable: there is no such group.
        """

    async def begin_episode(self, group: RolloutGroupId, place: int, attempt: int, lifetime: timedelta) -> EpisodeBegun:
        """The episode of this attempt, with a key that expires after `lifetime`; or, as it is, the episode at the place
        that was begun for this attempt before, or that has ended.

        Attempts at the place that still run are abandoned and their keys revoked.

        Raises:
            RecordUnusable: there is no such group or place, or the group is settled.
        """

    async def end_episode(self, end: EpisodeEnd) -> None:
        """Record how a running episode ended and revoke its key; nothing if it has ended already.

        After `infrastructure` it is abandoned: its turns are never trained.
        """

    async def score_episode(self, episode: EpisodeId, reward: float | None, reason: str) -> None:
        """Record the reward of an ended episode; nothing if it has one, runs, or was abandoned.

        Args:
            reward: None if its verifier gave none.

        Raises:
            RecordUnusable: the reward is not a finite number.
        """

    async def settle(self, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
        """Settle or drop the group, once; episodes that have not ended are abandoned.

        Returns:
            The result, and the policy if it has a batch since this call.

        Raises:
            RecordUnusable: there is no such group.
        """
