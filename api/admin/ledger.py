"""`GET /admin/v1/check`: whether the ledger is whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from api.dependencies import admin_services
from clawloop.contracts.answers import CheckReport

router = APIRouter(prefix="/admin/v1", tags=["ledger"])


@router.get("/check")
async def check_ledger(
    request: Request,
    files: Annotated[bool, Query(description="also compare the adapters' files with their hash")] = False,
) -> CheckReport:
    """Verify the invariants of turns, samples, steps and versions."""
    services = await admin_services(request)
    return await services.ledger.report(files=files)
