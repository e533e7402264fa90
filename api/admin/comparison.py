"""`POST /admin/v1/policies/{policy}/versions/{version}/compare`: the same prompts asked of a version and its parent."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.chat.comparison import MOST_PROMPTS, PROMPT_CHARACTERS, compare
from api.dependencies import services_of
from api.request_body import read_json
from clawloop.contracts.answers import Comparison
from clawloop.contracts.serving import Scope

router = APIRouter(prefix="/admin/v1", tags=["training"])


class CompareVersion(RequestBody):
    prompts: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=PROMPT_CHARACTERS)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
        | None
    ) = None
    """Prompts for both versions; left out: the last questions before replies that the version was trained on."""


@router.post("/policies/{policy}/versions/{version}/compare", openapi_extra=described(CompareVersion, required=False))
async def compare_version(
    request: Request, policy: str, version: Annotated[int, Path(ge=0, le=2**31 - 1)]
) -> Comparison:
    """Ask a version and its parent the same prompts, at temperature 0. The turns are side turns of the key."""
    services = services_of(request)
    key = await services.keys.require(request.headers, Scope.ADMIN)
    requested = check(CompareVersion, await read_json(request, services.limits, optional=True))
    return await compare(services, key, policy, version, requested.prompts)
