"""`/admin/v1/rollouts`, `/rollout-groups` and `/episodes`: a policy's practice in sandboxes, and its results.

Needs a key with the scope `admin`. A change holds in PostgreSQL when the answer comes; a workflow that was not notified
is started by the sweep.
"""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.dependencies import admin_services
from api.request_body import read_json
from clawloop.contracts.answers import EpisodePage, GroupPage
from clawloop.contracts.episodes import EpisodeView, RolloutsPlan, RolloutsView
from clawloop.ids import EpisodeId, RolloutGroupId
from clawloop.operations.applied import Applied
from clawloop.operations.episodes import episode_page, found_episode, group_page
from clawloop.operations.reasons import REASON_CHARACTERS

log = logging.getLogger(__name__)

router = APIRouter(prefix="/admin/v1", tags=["rollouts"])

PageSize = Annotated[int, Query(ge=1, le=500)]


class StartRollouts(RequestBody):
    environment: Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]
    """Name of the environment that gives the tasks, as its worker calls it."""
    size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Episodes of a group, which are compared."""
    groups: Annotated[int, Field(ge=1, le=1024)] = 2
    """Groups in flight."""
    barren: Annotated[int, Field(ge=1, le=2**31 - 1)] = 20
    """Rollouts pause after this many groups in a row without a sample."""
    curriculum: bool = False
    """Success decides which kinds of tasks are drawn, and how hard they are."""


class PauseRollouts(RequestBody):
    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARACTERS, pattern=r"\S")]
    """The reason, for people; shown with the state of the rollouts."""


@router.get("/rollouts")
async def show_rollouts(request: Request, policy: str = "default") -> RolloutsView:
    """The state of a policy's rollouts, and what they wait for."""
    services = await admin_services(request)
    return await services.rollout_operations.status(policy)


@router.post("/rollouts/start", openapi_extra=described(StartRollouts))
async def start_rollouts(request: Request, policy: str = "default") -> RolloutsView:
    """Start rollouts, or continue them by these settings."""
    services = await admin_services(request)
    requested = check(StartRollouts, await read_json(request, services.limits))
    plan = RolloutsPlan(requested.environment, requested.size, requested.groups, requested.barren, requested.curriculum)
    return _view(await services.rollout_operations.start(policy, plan))


@router.post("/rollouts/pause", openapi_extra=described(PauseRollouts))
async def pause_rollouts(request: Request, policy: str = "default") -> RolloutsView:
    """Start no group until rollouts are started again; those in flight are finished."""
    services = await admin_services(request)
    requested = check(PauseRollouts, await read_json(request, services.limits))
    return _view(await services.rollout_operations.pause(policy, requested.reason))


@router.get("/rollout-groups")
async def list_groups(
    request: Request, policy: str | None = None, after: RolloutGroupId | None = None, limit: PageSize = 50
) -> GroupPage:
    """Rollout groups, newest first: what became of each, and the mean reward, which tells how hard its task is."""
    services = await admin_services(request)
    return await group_page(services.episodes, policy=policy, after=after, limit=limit)


@router.get("/episodes")
async def list_episodes(
    request: Request,
    policy: str | None = None,
    group: Annotated[str | None, Query(description="only of this rollout group, by its id or its beginning")] = None,
    after: EpisodeId | None = None,
    limit: PageSize = 50,
) -> EpisodePage:
    """Episodes, newest first: how each ended, its reward, and what was trained."""
    services = await admin_services(request)
    of_group = None if group is None else await services.episodes.find_group(group)
    return await episode_page(services.episodes, policy=policy, group=of_group, after=after, limit=limit)


@router.get("/episodes/{episode_id}")
async def show_episode(
    request: Request,
    episode_id: Annotated[str, Path(description="An id or its beginning, or `last`.", examples=["last"])],
) -> EpisodeView:
    """One episode; its `sessions` have what was said."""
    services = await admin_services(request)
    return await found_episode(services.episodes, episode_id)


def _view(applied: Applied[RolloutsView]) -> RolloutsView:
    if applied.signal_error is not None:
        log.warning("signal failed: the sweep starts the rollouts' workflow", extra={"why": applied.signal_error})
    return applied.result
