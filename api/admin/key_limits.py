"""`/admin/v1/keys/{prefix}/limits`: what a key may use, and when it was used."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.dependencies import admin_services
from api.request_body import read_json
from clawloop.contracts.serving import KeyLimits, KeyUse
from clawloop.errors import RequestRejected

router = APIRouter(prefix="/admin/v1", tags=["keys"])

Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]


class LimitsRequest(RequestBody):
    """All of them at once: null, or left out, is no limit."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    stored_mib: Limit | None = None


@router.get("/keys/{prefix}/limits")
async def show_limits(request: Request, prefix: str) -> KeyUse:
    """A key's limits, policy, expiry and newest turn."""
    services = await admin_services(request)
    return _found(await services.key_uses.use_of(await services.key_operations.prefix_of(prefix)))


@router.put("/keys/{prefix}/limits", openapi_extra=described(LimitsRequest))
async def set_limits(request: Request, prefix: str) -> KeyUse:
    """Replace a key's limits; gateways follow within 30 s."""
    services = await admin_services(request)
    limits = check(LimitsRequest, await read_json(request, services.limits))
    found = await services.key_operations.prefix_of(prefix)
    return _found(await services.key_uses.set_limits(found, KeyLimits(**limits.model_dump())))


def _found(use: KeyUse | None) -> KeyUse:
    if use is None:
        message = "There is no such key; `clawloop key list` shows the keys."
        raise RequestRejected(message, status=404, code="not_found", field="prefix")
    return use
