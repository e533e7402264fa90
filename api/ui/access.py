"""`POST /ui/access/…`: makes, limits and revokes keys; makes and retires policies."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.logins import Login
from api.ui.page import PageRoute, operator, policy_of, read_form, render, render_page, version_number
from clawloop.contracts.answers import NewKey
from clawloop.contracts.serving import KeyLimits, Scope
from clawloop.errors import RequestRejected, SetupError
from clawloop.operations.keys import MOST_DAYS

router = APIRouter(route_class=PageRoute, include_in_schema=False)

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
        made = await services_of(request).key_operations.create(form.get("policy", ""), [scope], name, _days(form))
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
    services = services_of(request)
    form = await read_form(request)
    limits = KeyLimits(**{name: _limit(form, name) for name in _LIMITS})
    found = await services.key_operations.prefix_of(prefix)
    if await services.key_uses.set_limits(found, limits) is None:
        raise RequestRejected(f"There is no key {prefix}.", status=404, code="not_found", field="prefix")
    return await show_key(request, found)


@router.get("/ui/access/keys/{prefix}")
async def show_key(request: Request, prefix: str) -> Response:
    """A key's limits and newest turn."""
    login = await operator(request)
    services = services_of(request)
    use = await services.key_uses.use_of(await services.key_operations.prefix_of(prefix))
    if use is None:
        raise RequestRejected(f"There is no key {prefix}.", status=404, code="not_found", field="prefix")
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


def _days(form: dict[str, str]) -> int | None:
    value = form.get("days", "").strip()
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 5 or not 1 <= int(value) <= MOST_DAYS:
        raise RequestRejected(f"`days` is a number from 1 to {MOST_DAYS}, or empty: no end.", field="days")
    return int(value)


def _limit(form: dict[str, str], name: str) -> int | None:
    value = form.get(name, "").strip()
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 10 or not 1 <= int(value) <= 2**31 - 1:
        raise RequestRejected(f"`{name}` is a number from 1, or empty for no limit.", field=name)
    return int(value)
