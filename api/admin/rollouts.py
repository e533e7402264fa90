"""`/admin/v1/rollouts`, `/rollout-groups`, `/episodes`, and what environment workers ask of a gateway."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from api.dependencies import Services, admin_services, services_of
from api.request_body import RequestBody, check, described, read_body, read_json
from clawloop.core.contracts.answers import ArtifactStored, EpisodePage, EpisodeSecret, GroupPage
from clawloop.core.contracts.episodes import EpisodeView, RolloutsPlan, RolloutsView
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import ContentUnreadable, DiskFull, RecordUnusable, RequestRejected, StateConflict
from clawloop.core.ids import EpisodeId, RolloutGroupId
from clawloop.operations.applied import Applied
from clawloop.operations.rollouts import episode_page, found_episode, group_page
from clawloop.operations.training import REASON_CHARACTERS

# Rollouts and episodes ------------------------------------------------------------------------------------------------
# `/admin/v1/rollouts`, `/rollout-groups` and `/episodes`: a policy's practice in sandboxes, and its results.
#
# Needs a key with the scope `admin`. A change holds in PostgreSQL when the answer comes; a workflow that was not
# notified is started by the sweep.

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


# Environment workers --------------------------------------------------------------------------------------------------
# `/admin/v1/worker`: what an environment worker without a database needs of a gateway.
#
# Needs a key with the scope `worker`, or `admin`. Such a worker gets the key of each episode that it runs, and keeps
# what the agent left; that the episode ended, and its reward, it says to Temporal.

worker_router = APIRouter(prefix="/admin/v1/worker", tags=["rollouts"])

# A sandbox leaves at most 8 MiB of files; the archive has a few bytes more.
ARTIFACT_BYTES = 9 * 2**20
_FULL_RETRY_SECONDS = 10
# 33 bytes are a keyed digest, where content is encrypted.
Digest = Annotated[str, Path(description="in hex", pattern="^[0-9a-f]{64}(?:[0-9a-f]{2})?$", examples=["0" * 64])]
Sha256 = Annotated[str, Path(description="of the body", pattern="^[0-9a-f]{64}$", examples=["0" * 64])]
_ARCHIVE = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@worker_router.post("/episodes/{episode_id}/key")
async def episode_key(request: Request, response: Response, episode_id: EpisodeId) -> EpisodeSecret:
    """The key of an episode that runs and has no turn yet; no second agent gets it."""
    services = await _worker_services(request)
    response.headers.update(_HEADERS)
    try:
        return EpisodeSecret(key=await services.key_of_episode(episode_id))
    except RecordUnusable as error:
        raise StateConflict(f"{error}.", code="episode_not_running", field="episode_id") from error


@worker_router.put("/artifacts/{digest}", openapi_extra={"requestBody": {"required": True, "content": _ARCHIVE}})
async def store_artifact(request: Request, digest: Sha256) -> ArtifactStored:
    """Keep what an agent left, a tar archive of 9 MiB at most, under its SHA-256; again, it is kept longer."""
    services = await _worker_services(request)
    artifact = await read_body(request, replace(services.limits, body_bytes=ARTIFACT_BYTES))
    if sha256(artifact).hexdigest() != digest:
        raise RequestRejected(
            "The body's SHA-256 is not the one in the path. Send it again.", code="invalid_value", field="digest"
        )
    try:
        return ArtifactStored(digest=await services.artifacts.store(artifact))
    except DiskFull as error:
        raise RequestRejected(
            "The gateway's disk is too full for artifacts: make room, or lower CLAWLOOP_ARTIFACT_DAYS.",
            status=503,
            code="artifacts_full",
            retry_after=str(_FULL_RETRY_SECONDS),
        ) from error


@worker_router.get("/artifacts/{digest}", response_class=Response)
async def read_artifact(request: Request, digest: Digest) -> Response:
    """An agent's artifact, as a tar archive."""
    services = await _worker_services(request)
    try:
        artifact = await services.artifacts.load(digest)
    except ContentUnreadable:
        raise
    except RecordUnusable as error:
        raise RequestRejected(
            f"The artifact {digest[:12]}… is not at this gateway, was deleted by its age, or is damaged.",
            status=404,
            code="not_found",
            field="digest",
        ) from error
    return Response(artifact, headers=_HEADERS, media_type="application/x-tar")


async def _worker_services(request: Request) -> Services:
    """
    Raises:
        RequestRejected: 401 without a valid key, 403 without the scope.
        StoreUnavailable
    """
    services = services_of(request)
    await services.keys.require(request.headers, Scope.WORKER, Scope.ADMIN)
    return services
