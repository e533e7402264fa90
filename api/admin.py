"""`/admin/v1`: what an operator sees and changes. Needs a key with the scope `admin`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import services_of
from clawloop.contracts import Scope

router = APIRouter(prefix="/admin/v1")


class EngineStatus(BaseModel):
    id: str
    url: str
    healthy: bool
    draining: bool
    versions: dict[str, list[int]]


class EngineList(BaseModel):
    engines: list[EngineStatus]


@router.get("/engines")
async def list_engines(request: Request) -> EngineList:
    """The engines this gateway knows, and which of them answer."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    healthy = services.engines.healthy()
    return EngineList(
        engines=[
            EngineStatus(
                id=engine.id,
                url=engine.url,
                healthy=engine.id in healthy,
                draining=engine.draining,
                versions={policy: sorted(versions) for policy, versions in engine.versions.items()},
            )
            for engine in services.directory.now.engines
        ]
    )
