"""`/admin/v1/keys`: API keys, and the limits of each."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field

from api.dependencies import admin_services
from api.request_body import RequestBody, check, described, read_json
from clawloop.core.contracts.answers import KeyList, KeyRevoked, NewKey
from clawloop.core.contracts.serving import KeyLimits, KeyUse, Scope
from clawloop.core.errors import RequestRejected, SetupError
from clawloop.operations.keys import MOST_DAYS

# Keys -----------------------------------------------------------------------------------------------------------------
# `/admin/v1/keys`: API keys.

router = APIRouter(prefix="/admin/v1", tags=["keys"])


class CreateKey(RequestBody):
    scopes: Annotated[
        list[Annotated[Scope, Field(strict=False)]],
        Field(min_length=1, max_length=len(Scope), default_factory=lambda: [Scope.CHAT]),
    ]
    name: Annotated[str, Field(max_length=200)] = ""
    """A label for people."""
    policy: Annotated[str, Field(min_length=1, max_length=200)] = "default"
    """The policy the key gives access to."""
    policies: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=1000, default_factory=list)
    ]
    """The policies that the header `X-Clawloop-Policy` may choose besides; `*`: any."""
    days: Annotated[int, Field(ge=1, le=MOST_DAYS)] | None = None
    """After which it expires; null: it does not."""


@router.get("/keys")
async def list_keys(request: Request) -> KeyList:
    """All keys, revoked ones included, without their secrets."""
    services = await admin_services(request)
    return await services.key_operations.list()


@router.post("/keys", status_code=201, openapi_extra=described(CreateKey, required=False))
async def create_key(request: Request) -> NewKey:
    """Make a key. Its secret is not stored and cannot be shown again."""
    services = await admin_services(request)
    body = await read_json(request, services.limits, optional=True)
    wanted = check(CreateKey, body)
    try:
        return await services.key_operations.create(
            wanted.policy, wanted.scopes, wanted.name, wanted.days, wanted.policies
        )
    except SetupError as error:
        raise RequestRejected(f"{error}.", status=404, code="policy_not_found", field="policy") from error


@router.delete("/keys/{prefix}")
async def revoke_key(
    request: Request,
    prefix: Annotated[str, Path(description="Its public part or the beginning of it, or its name.")],
) -> KeyRevoked:
    """End a key. Gateways refuse it within 30 s."""
    services = await admin_services(request)
    return await services.key_operations.revoke(prefix)


# Limits ---------------------------------------------------------------------------------------------------------------
# `/admin/v1/keys/{prefix}/limits`: what a key may use, and when it was used.

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
    return await services.key_operations.use_of(prefix)


@router.put("/keys/{prefix}/limits", openapi_extra=described(LimitsRequest))
async def set_limits(request: Request, prefix: str) -> KeyUse:
    """Replace a key's limits; gateways follow within 30 s."""
    services = await admin_services(request)
    limits = check(LimitsRequest, await read_json(request, services.limits))
    return await services.key_operations.set_limits(prefix, KeyLimits(**limits.model_dump()))
