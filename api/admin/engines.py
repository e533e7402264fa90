"""`GET /admin/v1/engines`: the engines this gateway routes to."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import admin_services

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
    """The engines in the directory, and whether each answers."""
    services = await admin_services(request)
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
            for engine in services.directory.snapshot.engines
        ]
    )
