"""`POST /ui/judge/history`: stored turns judged by another recipe, compared, and on request judged again by it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.page import PageRoute, operator, policy_of, read_form, render, render_page
from clawloop.errors import RecipeRejected, RequestRejected
from clawloop.operations.history import MOST_TURNS, judged_by_workers
from clawloop.recipes.recipe import Recipe, read_recipe

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.post("/ui/judge/history")
async def compare_history(request: Request, policy: str | None = None) -> Response:
    """Judge further stored turns, without changing anything, and compare all so far."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = await read_form(request)
    turns = form.get("turns", "")
    if not turns.isascii() or not turns.isdigit() or len(turns) > 3 or not 0 < int(turns) <= MOST_TURNS:
        raise RequestRejected(f"`turns` is a number from 1 to {MOST_TURNS}.", field="turns")
    try:
        found = await services.history.compare(chosen, _recipe(form), int(turns))
    except RecipeRejected as error:
        raise RequestRejected(f"{error}.", code="invalid_recipe", field=error.field) from error
    notice = judged_by_workers(found.judge)
    return render_page(request, login, "_agreement.html", chosen, "settings", found=found, notice=notice)


@router.post("/ui/judge/history/apply")
async def apply_history(request: Request, policy: str | None = None) -> Response:
    """Have the turns judged again on which the verdicts differ."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    try:
        applied = await services.history.apply(chosen, _recipe(await read_form(request)))
    except RecipeRejected as error:
        raise RequestRejected(f"{error}.", code="invalid_recipe", field=error.field) from error
    refused = len([turn for turn in applied if turn.refused is not None])
    asked = len(applied) - refused
    note = f"{asked} turns are judged again, by the judge workers' own judge; their places show the results."
    if refused:
        note += f" {refused} cannot be."
    return render(request, "_note.html", note=note)


def _recipe(form: dict[str, str]) -> Recipe | None:
    """
    Raises:
        RecipeRejected
    """
    written = form.get("recipe", "")
    return read_recipe(written) if written.strip() else None
