"""What the ledger's activities of episodes need from outside."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from clawloop.contracts.episodes import (
    EpisodeBegun,
    EpisodeEnd,
    GroupBegun,
    GroupResult,
    NewGroup,
    NextGroups,
)
from clawloop.ids import EpisodeId, RolloutGroupId


class RolloutStore(Protocol):
    async def next_groups(self, policy: str) -> NextGroups:
        """Insert the groups that the policy's rollouts have room for: none while they or training are paused, or enough
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

    async def begin_group(self, group: RolloutGroupId, lifetime: timedelta) -> GroupBegun:
        """The group's task, and for each place what `begin_episode` says of its first attempt, in one transaction.

        Raises:
            RecordUnusable: there is no such group, or its policy was retired.
        """

    async def begin_episode(self, group: RolloutGroupId, place: int, attempt: int, lifetime: timedelta) -> EpisodeBegun:
        """The episode of this attempt, with a key that expires after `lifetime`; or, as it is, the episode at the place
        that was begun for this attempt before, or that has ended.

        Attempts at the place that still run are abandoned and their keys revoked.

        Raises:
            RecordUnusable: there is no such group or place, or the group is settled.
        """

    async def end_episode(self, end: EpisodeEnd) -> str | None:
        """Record how a running episode ended and revoke its key; nothing if it has ended already.

        After `infrastructure` it is abandoned: its turns are never trained. What its agent left is noted in any case.

        Returns:
            Its policy, if this made room for another group of its rollouts.
        """

    async def score_episode(self, episode: EpisodeId, reward: float | None, reason: str) -> None:
        """Record the reward of an ended episode; nothing if it has one, runs, or was abandoned.

        Args:
            reward: None if its verifier gave none.

        Raises:
            EpisodeUnusable: the reward is not a finite number between ±`REWARD_LIMIT`.
        """

    async def end_scored_episode(self, end: EpisodeEnd, reward: float | None, reason: str) -> str | None:
        """`end_episode` and `score_episode` in one transaction, for an episode whose reward came with its end.

        Raises:
            EpisodeUnusable: the reward is not a finite number between ±`REWARD_LIMIT`.
        """

    async def settle(self, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
        """Settle or drop the group, once; episodes that have not ended are abandoned.

        Returns:
            The result, and the policy if it has a batch since this call.

        Raises:
            RecordUnusable: there is no such group.
        """
