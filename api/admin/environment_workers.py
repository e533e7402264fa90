"""`/admin/v1/worker`: what an environment worker without a database needs of a gateway.

Needs a key with the scope `worker`, or `admin`. Such a worker gets the key of each episode that it runs, and keeps what
the agent left; that the episode ended, and its reward, it says to Temporal.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.dependencies import Services, services_of
from api.request_body import read_body
from clawloop.contracts.answers import ArtifactStored, EpisodeSecret
from clawloop.contracts.serving import Scope
from clawloop.errors import ContentUnreadable, DiskFull, RecordUnusable, RequestRejected, StateConflict
from clawloop.ids import EpisodeId

router = APIRouter(prefix="/admin/v1/worker", tags=["rollouts"])

# A sandbox leaves at most 8 MiB of files; the archive has a few bytes more.
ARTIFACT_BYTES = 9 * 2**20
_FULL_RETRY_SECONDS = 10
# 33 bytes are a keyed digest, where content is encrypted.
Digest = Annotated[str, Path(description="in hex", pattern="^[0-9a-f]{64}(?:[0-9a-f]{2})?$", examples=["0" * 64])]
Sha256 = Annotated[str, Path(description="of the body", pattern="^[0-9a-f]{64}$", examples=["0" * 64])]
_ARCHIVE = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@router.post("/episodes/{episode_id}/key")
async def episode_key(request: Request, response: Response, episode_id: EpisodeId) -> EpisodeSecret:
    """The key of an episode that runs and has no turn yet; no second agent gets it."""
    services = await _worker_services(request)
    response.headers.update(_HEADERS)
    try:
        return EpisodeSecret(key=await services.episode_keys.key_of(episode_id))
    except RecordUnusable as error:
        raise StateConflict(f"{error}.", code="episode_not_running", field="episode_id") from error


@router.put("/artifacts/{digest}", openapi_extra={"requestBody": {"required": True, "content": _ARCHIVE}})
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


@router.get("/artifacts/{digest}", response_class=Response)
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
