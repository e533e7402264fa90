"""`GET /ui/settings` and `/ui/probes`: keys, policies, recipes, probes and upkeep, with the forms that change them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from api.admin.sessions import lines_of
from api.dependencies import Services, services_of
from api.ui.logins import Login
from api.ui.messages import blocks_of
from api.ui.page import PageRoute, integer, operator, policy_of, read_form, render, render_page, version_number, viewer
from clawloop.core.contracts.answers import NewKey
from clawloop.core.contracts.serving import KeyLimits, Scope
from clawloop.core.contracts.training import StoredProbe
from clawloop.core.errors import RequestRejected, SetupError
from clawloop.core.ids import SessionId
from clawloop.core.recipes.recipe import Recipe, read_recipe, toml_of
from clawloop.operations.export import ExportFilter, ExportKind
from clawloop.operations.history import MOST_COMPARED_TURNS, judge_precision, judged_by_workers
from clawloop.operations.keys import MOST_DAYS
from clawloop.operations.probes import MOST_PROBES, find_probe, read_probes

# The page -------------------------------------------------------------------------------------------------------------
# `GET /ui/settings`: the keys, the policies, what a policy learns by, and upkeep; `GET /ui/probes`.

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
        probes=len(await services.probes.all(chosen)),
        keys=(await services.key_operations.list()).keys,
        scopes=[scope.value for scope in Scope],
        made=None,
        precision=await judge_precision(services.voted_turns, chosen),
        trial=await services.newest_trial(),
        note=None,
    )


@router.post("/ui/recipe")
async def set_recipe(request: Request, policy: str | None = None) -> Response:
    """Learn by the recipe of the form from the next step on; the answer is the recipe as it is then."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    operations = services.training_operations
    recipe = operations.check_recipe(read_recipe((await read_form(request)).get("recipe", "")))
    await operations.set_recipe(chosen, recipe)
    note = f"It learns by {recipe.name} ({recipe.hash[:12]}) from the next step on."
    return render_page(request, login, "_recipe.html", chosen, "settings", recipe=toml_of(recipe), note=note)


@router.get("/ui/probes")
async def list_probes(
    request: Request, policy: str | None = None, text: Annotated[str, Query(max_length=200)] = ""
) -> Response:
    login = await viewer(request)
    services = services_of(request)
    return await _probes(request, services, login, policy_of(services, login, policy), None, text, "probes.html")


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
async def remove_probe(
    request: Request, probe: str, policy: str | None = None, text: Annotated[str, Query(max_length=200)] = ""
) -> Response:
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    await services.probes.remove(chosen, find_probe(chosen, await services.probes.all(chosen), probe))
    return await _probes(request, services, login, chosen, "Removed.", text)


async def _probes(
    request: Request,
    services: Services,
    login: Login,
    policy: str,
    note: str | None,
    text: str = "",
    template: str = "_probes.html",
) -> Response:
    wanted = text.strip().casefold()
    probes = [probe for probe in await services.probes.all(policy) if wanted in _words_of(probe)]
    return render_page(request, login, template, policy, "settings", probes=probes, text=text.strip(), note=note)


def _words_of(probe: StoredProbe) -> str:
    """What is looked for in a probe: its prompt and its checks."""
    content = probe.content
    prompt = [block.text for message in content.messages for block in blocks_of(message)]
    checks = [*content.contains, content.regex or "", content.exact or ""]
    return "\n".join([*prompt, *checks]).casefold()


# Keys and policies ----------------------------------------------------------------------------------------------------
# `POST /ui/access/…`: makes, limits and revokes keys; makes and retires policies.

_NAME_CHARACTERS = 200
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "stored_mib")


@router.post("/ui/access/keys")
async def make_key(request: Request, policy: str | None = None) -> Response:
    """Make a key of any scope; its secret is shown only once."""
    await operator(request)
    form = await read_form(request)
    try:
        scope = Scope(form.get("scope", ""))
    except ValueError:
        raise RequestRejected("The scope is chat, read or admin.", field="scope") from None
    if len(name := form.get("name", "").strip()) > _NAME_CHARACTERS:
        raise RequestRejected(f"The name has {_NAME_CHARACTERS} characters at most.", field="name")
    try:
        policies = [named for part in form.get("policies", "").split(",") if (named := part.strip())]
        days = _optional(form, "days", MOST_DAYS, f"1 to {MOST_DAYS}, or empty: no end")
        made = await services_of(request).key_operations.create(form.get("policy", ""), [scope], name, days, policies)
    except SetupError as error:
        raise RequestRejected(f"{error}.", status=404, code="policy_not_found", field="policy") from error
    return await _keys(request, policy, None, made)


@router.post("/ui/access/keys/{prefix}/revoke")
async def revoke_key(request: Request, prefix: str, policy: str | None = None) -> Response:
    await operator(request)
    revoked = await services_of(request).key_operations.revoke(prefix)
    return await _keys(request, policy, f"{revoked.prefix} is revoked: gateways refuse it within 30 seconds.")


@router.post("/ui/access/keys/{prefix}/limits")
async def limit_key(request: Request, prefix: str, policy: str | None = None) -> Response:
    """Replace a key's limits; an empty field is no limit."""
    await operator(request)
    form = await read_form(request)
    limits = KeyLimits(**{name: _optional(form, name, 2**31 - 1, "1, or empty for no limit") for name in _LIMITS})
    use = await services_of(request).key_operations.set_limits(prefix, limits)
    return await show_key(request, use.prefix)


@router.get("/ui/access/keys/{prefix}")
async def show_key(request: Request, prefix: str) -> Response:
    """A key's limits and newest turn."""
    login = await operator(request)
    use = await services_of(request).key_operations.use_of(prefix)
    return render(request, "_key_limits.html", use=use, limits=_LIMITS, login=login)


@router.post("/ui/access/policies")
async def make_policy(request: Request, policy: str | None = None) -> Response:
    """Make a policy that begins at the base model of the policy of the page, or from a version of it."""
    login = await operator(request)
    services = services_of(request)
    like = policy_of(services, login, policy)
    form = await read_form(request)
    version = version_number(form.get("version", "").strip() or "0")
    made = await services.training_operations.create_policy(form.get("name", "").strip(), like, None, version)
    begins = f" It answers as version {version} of {like} within seconds." if version else ""
    return await _policies(request, login, policy, f"{made.result.policy} is made. Make a key for it.{begins}")


@router.post("/ui/access/policies/{name}/retire")
async def retire_policy(request: Request, name: str, policy: str | None = None) -> Response:
    login = await operator(request)
    retired = await services_of(request).training_operations.retire_policy(name)
    note = f"{retired.result.policy} is retired: its keys are revoked for good."
    return await _policies(request, login, policy, note)


async def _policies(request: Request, login: Login, policy: str | None, note: str) -> Response:
    services = services_of(request)
    await services.directory.refresh()
    return render_page(request, login, "_policies.html", policy_of(services, login, policy), "settings", note=note)


async def _keys(request: Request, policy: str | None, note: str | None, made: NewKey | None = None) -> Response:
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    keys = (await services.key_operations.list()).keys
    scopes = [scope.value for scope in Scope]
    return render_page(request, login, "_keys.html", chosen, "settings", keys=keys, made=made, note=note, scopes=scopes)


def _optional(form: dict[str, str], field: str, most: int, takes: str) -> int | None:
    value = form.get(field, "").strip()
    return integer(value, field, 1, most, takes) if value else None


# Upkeep ---------------------------------------------------------------------------------------------------------------
# `/ui/upkeep/…`, `/ui/export`: the ledger's check, judging again, what was recorded.


@router.post("/ui/upkeep/check")
async def check_ledger(request: Request) -> Response:
    """Verify the invariants, and compare the adapters' files with their hash."""
    await operator(request)
    return render(request, "_check.html", report=await services_of(request).check_ledger(True))


@router.post("/ui/upkeep/unjudged")
async def judge_unjudged(request: Request) -> Response:
    await operator(request)
    turns = await services_of(request).session_operations.rejudge_unjudged()
    return _asked(request, len(turns), len([turn for turn in turns if turn.refused is not None]))


@router.post("/ui/sessions/{session_id}/judge")
async def judge_session(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    services = services_of(request)
    # An id that no session has is an error, not a session without turns.
    session = await services.reading.references.session(str(session_id))
    turns = await services.session_operations.rejudge_session(session)
    return _asked(request, len(turns), len([turn for turn in turns if turn.refused is not None]))


@router.get("/ui/export")
async def export(request: Request, records: ExportKind, policy: str | None = None) -> Response:
    """A file with what was recorded; as `GET /admin/v1/export`, with the login for a key."""
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    pages = services.exporter.pages(records, ExportFilter(chosen, None, None, None), None)
    # Read before the status is sent, so that a database that is away is a 503.
    first = await anext(pages, None)
    headers = {"Content-Disposition": f'attachment; filename="{records.value}.jsonl"'}
    return StreamingResponse(lines_of(first, pages), media_type="application/x-ndjson", headers=headers)


def _asked(request: Request, turns: int, refused: int) -> Response:
    note = f"{turns - refused} turns are judged again; their places show the results."
    if refused:
        note += f" {refused} cannot be."
    return render(request, "_note.html", note=note)


# Judging by another recipe --------------------------------------------------------------------------------------------
# `POST /ui/judge/history`: stored turns judged by another recipe, compared, and on request judged again by it.


@router.post("/ui/judge/history")
async def compare_history(request: Request, policy: str | None = None) -> Response:
    """Judge further stored turns, without changing anything, and compare all so far."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    form = await read_form(request)
    turns = integer(form.get("turns", ""), "turns", 1, MOST_COMPARED_TURNS)
    found = await services.history.compare(chosen, _recipe(form), turns)
    notice = judged_by_workers(found.judge)
    return render_page(request, login, "_agreement.html", chosen, "settings", found=found, notice=notice)


@router.post("/ui/judge/history/apply")
async def apply_history(request: Request, policy: str | None = None) -> Response:
    """Have the turns judged again on which the verdicts differ."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    applied = await services.history.apply(chosen, _recipe(await read_form(request)))
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
