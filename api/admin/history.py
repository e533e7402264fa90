"""`POST /admin/v1/judge/history`: compares stored verdicts with those of another judge or recipe, for admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.dependencies import admin_services
from api.request_body import read_json
from clawloop.errors import RecipeRejected, RequestRejected
from clawloop.operations.history import MOST_TURNS, ComparedHistory
from clawloop.recipes.recipe import parse_recipe

router = APIRouter(prefix="/admin/v1", tags=["judging"])


class CompareHistory(RequestBody):
    recipe: dict[str, Any] | None = None
    """Recipe that judges the turns; the policy's own if left out."""
    turns: Annotated[int, Field(ge=0, le=MOST_TURNS)] = 20
    """Number of further turns that this call judges."""
    apply: bool = False
    """Then have those turns judged again on which the verdicts differ: by the judge workers, with their own judge, so
    switch the workers first if it is not the one compared here."""


@router.post("/judge/history", openapi_extra=described(CompareHistory))
async def compare_history(request: Request, policy: str = "default") -> ComparedHistory:
    """Judge further stored turns without changing anything, and compare all so far."""
    services = await admin_services(request)
    requested = check(CompareHistory, await read_json(request, services.limits))
    try:
        recipe = None if requested.recipe is None else parse_recipe(requested.recipe)
        found = await services.history.compare(policy, recipe, requested.turns)
    except RecipeRejected as error:
        raise RequestRejected(f"{error}.", code="invalid_recipe", field=error.field) from error
    applied = await services.history.apply(policy, recipe) if requested.apply else []
    return ComparedHistory.of(found, applied)
