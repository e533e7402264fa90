"""`/admin/v1/status`, `/check` and `/engines`: the status of every part, and the engines."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from api.dependencies import admin_services
from api.request_body import RequestBody, check, described, read_json
from clawloop.core.contracts.answers import CheckReport, EngineAdded, EngineList, EngineStatus, ServiceStatus
from clawloop.core.errors import RequestRejected, SetupError

# Status and check -----------------------------------------------------------------------------------------------------
# `GET /admin/v1/status` and `/check`: how all stands, and whether the ledger is whole.

ledger_router = APIRouter(prefix="/admin/v1", tags=["ledger"])


@ledger_router.get("/status")
async def show_status(request: Request) -> ServiceStatus:
    """Status of every component: engines, training of each policy, sessions, and current problems."""
    services = await admin_services(request)
    return await services.overview.status()


@ledger_router.get("/check")
async def check_ledger(
    request: Request,
    files: Annotated[bool, Query(description="also compare the adapters' files with their hash")] = False,
) -> CheckReport:
    """Verify the invariants of turns, samples, steps and versions."""
    services = await admin_services(request)
    return await services.check_ledger(files)


# Engines --------------------------------------------------------------------------------------------------------------
# `/admin/v1/engines`: the engines that gateways send requests to.

router = APIRouter(prefix="/admin/v1", tags=["engines"])

EngineReference = Annotated[str, Path(description="An id, its beginning, or a URL.", examples=["127.0.0.1:8100"])]


class AddEngine(RequestBody):
    url: Annotated[str, Field(min_length=1, max_length=1000, examples=["http://127.0.0.1:8101"])]
    require_guard: bool = False
    """Refuse an engine that does not require authentication."""


class DrainEngine(RequestBody):
    undo: bool = False
    """Send it requests again."""
    force: bool = False
    """Also if no other engine takes requests."""


@router.get("/engines")
async def list_engines(request: Request) -> EngineList:
    """The engines, the versions each has loaded, and whether each answers."""
    services = await admin_services(request)
    return await services.engine_operations.list()


@router.post("/engines", status_code=201, openapi_extra=described(AddEngine))
async def add_engine(request: Request) -> EngineAdded:
    """Let gateways send requests to one more engine."""
    services = await admin_services(request)
    added = check(AddEngine, await read_json(request, services.limits))
    try:
        return await services.engine_operations.add(added.url, require_guard=added.require_guard)
    except SetupError as error:
        raise RequestRejected(f"{error}.", code="invalid_value", field="url") from error


@router.post("/engines/{engine}/drain", openapi_extra=described(DrainEngine, required=False))
async def drain_engine(request: Request, engine: EngineReference) -> EngineStatus:
    """Send an engine no new requests, or with `undo` send some again."""
    services = await admin_services(request)
    body = await read_json(request, services.limits, optional=True)
    requested = check(DrainEngine, body)
    return await services.engine_operations.drain(engine, undo=requested.undo, force=requested.force)


@router.delete("/engines/{engine}", status_code=204)
async def remove_engine(request: Request, engine: EngineReference, force: bool = False) -> None:
    """Forget an engine. Drain it first: running replies are not waited for."""
    services = await admin_services(request)
    await services.engine_operations.remove(engine, force=force)
