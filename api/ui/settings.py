"""`GET /ui/settings`: what a policy learns by, its probes, the keys, the policies, and upkeep."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import Services, services_of
from api.ui.logins import Login
from api.ui.page import PageRoute, operator, policy_of, read_form, render_page, viewer
from clawloop.contracts.serving import Scope
from clawloop.errors import RecipeRejected, RequestRejected
from clawloop.operations.precision import judge_precision
from clawloop.operations.probes import MOST_PROBES, find_probe, read_probes
from clawloop.recipes.recipe import read_recipe, toml_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/ui/settings")
async def show(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    return render_page(
        request,
        login,
        "settings.html",
        chosen,
        "settings",
        recipe=toml_of(await services.training.recipe(chosen)),
        probes=await services.probes.all(chosen),
        keys=(await services.key_operations.list()).keys,
        scopes=[scope.value for scope in Scope],
        made=None,
        precision=await judge_precision(services.votes, chosen),
        note=None,
    )


@router.post("/ui/recipe")
async def set_recipe(request: Request, policy: str | None = None) -> Response:
    """Learn by the recipe of the form from the next step on; the answer is the recipe as it is then."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    operations = services.training_operations
    try:
        recipe = operations.check_recipe(read_recipe((await read_form(request)).get("recipe", "")))
        await operations.set_recipe(chosen, recipe)
    except RecipeRejected as error:
        raise RequestRejected(f"{error}.", code="invalid_recipe", field=error.field) from error
    note = f"It learns by {recipe.name} ({recipe.hash[:12]}) from the next step on."
    return render_page(request, login, "_recipe.html", chosen, "settings", recipe=toml_of(recipe), note=note)


@router.post("/ui/probes")
async def add_probe(request: Request, policy: str | None = None) -> Response:
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = {name: value for name, value in (await read_form(request)).items() if value.strip()}
    written = {name: form[name] for name in ("prompt", "contains", "regex", "exact") if name in form}
    probes, faults = read_probes([written])
    if faults:
        raise RequestRejected(f"This probe cannot be used: {faults[0]}.", code="invalid_probe", field="prompt")
    await services.probes.add(chosen, probes, MOST_PROBES)
    return await _probes(request, services, login, chosen, "Added: the gate asks it of each version from now on.")


@router.post("/ui/probes/{probe}/remove")
async def remove_probe(request: Request, probe: str, policy: str | None = None) -> Response:
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    await services.probes.remove(chosen, find_probe(chosen, await services.probes.all(chosen), probe))
    return await _probes(request, services, login, chosen, "Removed.")


async def _probes(request: Request, services: Services, login: Login, policy: str, note: str) -> Response:
    probes = await services.probes.all(policy)
    return render_page(request, login, "_probes.html", policy, "settings", probes=probes, note=note)
