"""`/admin/v1/keys`: API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.dependencies import admin_services
from api.request_body import read_json
from clawloop.contracts.answers import KeyList, KeyRevoked, NewKey
from clawloop.contracts.serving import Scope
from clawloop.errors import RequestRejected, SetupError
from clawloop.operations.keys import MOST_DAYS

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
        return await services.key_operations.create(wanted.policy, wanted.scopes, wanted.name, wanted.days)
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
