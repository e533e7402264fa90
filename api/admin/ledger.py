"""`GET /admin/v1/status` and `/check`: how all stands, and whether the ledger is whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from api.dependencies import admin_services
from clawloop.contracts.answers import CheckReport, ServiceStatus

router = APIRouter(prefix="/admin/v1", tags=["ledger"])


@router.get("/status")
async def show_status(request: Request) -> ServiceStatus:
    """Status of every component: engines, training of each policy, sessions, and current problems."""
    services = await admin_services(request)
    return await services.overview.status()


@router.get("/check")
async def check_ledger(
    request: Request,
    files: Annotated[bool, Query(description="also compare the adapters' files with their hash")] = False,
) -> CheckReport:
    """Verify the invariants of turns, samples, steps and versions."""
    services = await admin_services(request)
    return await services.ledger.report(files=files)
