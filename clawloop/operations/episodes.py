"""Rollout groups and episodes as people list and read them."""

from __future__ import annotations

from typing import Protocol

from clawloop.contracts.answers import EpisodePage, GroupPage
from clawloop.contracts.episodes import EpisodeView, GroupView
from clawloop.errors import NotFound
from clawloop.ids import EpisodeId, RolloutGroupId


class EpisodeReader(Protocol):
    """Rollout groups and episodes for people. Every method raises StoreUnavailable, and NotFound for a policy that
    does not exist."""

    async def groups(self, *, policy: str | None, after: RolloutGroupId | None, limit: int) -> list[GroupView]:
        """Groups, newest first; `after` is the last of the previous page."""

    async def episodes(
        self, *, policy: str | None, group: RolloutGroupId | None, after: EpisodeId | None, limit: int
    ) -> list[EpisodeView]:
        """Episodes, newest first; `after` is the last of the previous page."""

    async def episode(self, episode: EpisodeId) -> EpisodeView | None:
        """The episode; None if there is none of this id."""

    async def find_episode(self, reference: str) -> EpisodeId:
        """The episode with this id or beginning of an id; `last` is the newest. Raises NotFound and AmbiguousId."""

    async def find_group(self, reference: str) -> RolloutGroupId:
        """The rollout group with this id or beginning of an id. Raises NotFound and AmbiguousId."""


async def group_page(
    reader: EpisodeReader, *, policy: str | None, after: RolloutGroupId | None = None, limit: int
) -> GroupPage:
    # One more than the page holds shows whether there is another page.
    found = await reader.groups(policy=policy, after=after, limit=limit + 1)
    page = found[:limit]
    return GroupPage(groups=page, next=page[-1].id if len(found) > limit else None)


async def episode_page(
    reader: EpisodeReader,
    *,
    policy: str | None,
    group: RolloutGroupId | None,
    after: EpisodeId | None = None,
    limit: int,
) -> EpisodePage:
    found = await reader.episodes(policy=policy, group=group, after=after, limit=limit + 1)
    page = found[:limit]
    return EpisodePage(episodes=page, next=page[-1].id if len(found) > limit else None)


async def found_episode(reader: EpisodeReader, reference: str) -> EpisodeView:
    """
    Raises:
        NotFound, AmbiguousId, StoreUnavailable
    """
    episode = await reader.episode(await reader.find_episode(reference))
    if episode is None:  # nothing deletes episodes: an id was found a moment ago
        raise NotFound(f"There is no episode {reference!r}.", code="episode_not_found", field="episode")
    return episode
