"""Parts shared by the whole page: assets, login, templates, headers, and errors as HTML."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from api.dependencies import Services, services_of
from api.errors import Problem, to_problem
from api.request_body import read_body
from api.ui.changes import AWAY, ChangeUnknown
from api.ui.logins import COOKIE, Login
from api.ui.messages import blocks_of, diff_lines, first_words, marked_lines, reply_words, structured
from api.ui.wording import FILTERS, explained, meaning_of, words_of
from clawloop.core.errors import ClawloopError, RequestRejected, StoreUnavailable
from clawloop.operations.training import REASON_CHARACTERS

# Assets ---------------------------------------------------------------------------------------------------------------
# `GET /ui/assets/{name}`: style sheets, scripts and the icon of this folder; nothing comes from elsewhere.

_FOLDER = Path(__file__).parent / "assets"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
ASSETS_VERSION = hashlib.sha256(b"".join(_FILES.values())).hexdigest()[:12]
"""Changes with every asset: a part of their addresses, so that browsers keep them for as long as they are the same."""

assets_router = APIRouter(include_in_schema=False)


@assets_router.get("/ui/assets/{name}")
async def asset(name: str) -> Response:
    if (content := _FILES.get(name)) is None:
        raise RequestRejected(f"There is no asset {name!r}.", status=404, code="not_found")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


# The page -------------------------------------------------------------------------------------------------------------
# Shared by all parts of the page: the login a request needs, the templates, the headers, and errors as HTML.

# Nothing from elsewhere, no inline script or style, no eval, no frame around the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`, with which browsers send `Origin: null` along with a form.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FORM_FIELDS = 20
_FORM_BYTES = 2**20  # a recipe has some KB, a comment 20,000 characters
_DIGITS = 10  # of the largest number; Python reads none of thousands of digits
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(FILTERS | {"blocks": blocks_of, "first_words": first_words, "reply_words": reply_words})
_TEMPLATES.filters.update({"structured": structured, "diff_lines": diff_lines, "marked_lines": marked_lines})
_TEMPLATES.filters.update({"meaning": meaning_of, "state_words": words_of, "explained": explained})
_TEMPLATES.globals |= {"assets": ASSETS_VERSION, "reason_characters": REASON_CHARACTERS}


class PageRoute(APIRoute):
    """A route whose answers have the page's headers and whose errors are HTML."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await _answer(request, handle)
            except ClawloopError as error:
                response = _problem_page(request, to_problem(error), isinstance(error, ChangeUnknown))
            except RequestValidationError as error:
                field = ".".join(str(part) for part in error.errors()[0]["loc"][1:])
                message = f"`{field}`: {error.errors()[0]['msg']}."
                response = _problem_page(request, Problem(400, message, "invalid_value", field=field))
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer


async def _answer(request: Request, handle: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
    changes = services_of(request).changes
    reads = request.method == "GET"
    return await changes.unless_away(
        handle(request), lambda: getattr(request.state, "reads_store", False), goes_on=not reads
    )


async def viewer(request: Request, *, needs_store: bool = True) -> Login:
    """The login of a request.

    Args:
        needs_store: what it asks for cannot be answered without PostgreSQL.

    Raises:
        RequestRejected: 401 without a login.
        StoreUnavailable
    """
    services = services_of(request)
    login = await services.logins.find(request.cookies.get(COOKIE))
    if login is None:
        raise RequestRejected("Log in to see this page.", status=401, code="login_required")
    # Said at once: a page reads with the patience of background work, half a minute for a server that is silent.
    if needs_store and await services.changes.mark() == AWAY:
        raise StoreUnavailable("PostgreSQL did not answer a moment ago")
    request.state.reads_store = needs_store
    request.state.login = login
    return login


async def operator(request: Request, *, needs_store: bool = True) -> Login:
    """The login of a request that changes something.

    Args:
        needs_store: as of `viewer`.

    Raises:
        RequestRejected: 401 without a login; 403 without the scope `admin` or with the wrong CSRF token.
        StoreUnavailable
    """
    login = await viewer(request, needs_store=needs_store)
    if not hmac.compare_digest(request.headers.get("x-csrf-token", "").encode(), login.csrf.encode()):
        message = "This form is not of your login. Load the page again."
        raise RequestRejected(message, status=403, code="csrf_rejected")
    if not login.may_write:
        message = "Your key has the scope `read`: it can look and change nothing."
        raise RequestRejected(message, status=403, code="insufficient_scope")
    return login


async def read_form(request: Request, most_bytes: int = _FORM_BYTES) -> dict[str, str]:
    """The fields of a form; of several with one name the last.

    Raises:
        RequestRejected
    """
    body = await read_body(request, replace(services_of(request).limits, body_bytes=most_bytes))
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FORM_FIELDS))
    except ValueError:
        raise RequestRejected("The form cannot be read.", code="invalid_value") from None


def render(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page or a part of one."""
    return HTMLResponse(_TEMPLATES.get_template(template).render(request=request, **context), status)


def render_page(request: Request, login: Login, template: str, policy: str, here: str, **context: Any) -> HTMLResponse:
    """A whole page.

    Args:
        policy: the one it is about.
        here: its entry in the navigation.
    """
    services = services_of(request)
    policies = [known.id for known in services.directory.snapshot.policies]
    shared: dict[str, Any] = {"login": login, "policy": policy, "policies": policies, "here": here}
    shared["workflow_link"] = services.links.of
    return render(request, template, **shared, **context)


def policy_of(services: Services, login: Login, policy: str | None) -> str:
    """The policy a page is about: the one asked for, or that of the login's key."""
    return policy if policy else login.key.policy


def version_number(value: str) -> int:
    """The version that a form or an address names.

    Raises:
        RequestRejected: it is no number from 0 that PostgreSQL stores.
    """
    return integer(value, "version", 0, 2**31 - 1, "0")


def integer(value: str, field: str, least: int, most: int, takes: str | None = None) -> int:
    """The number that a field of a form or an address has.

    Args:
        takes: the words for what the field takes, after "a number from"; None: from `least` to `most`.

    Raises:
        RequestRejected: it is none, or out of its bounds.
    """
    if not value.isascii() or not value.isdigit() or len(value) > _DIGITS or not least <= int(value) <= most:
        raise RequestRejected(f"`{field}` is a number from {takes or f'{least} to {most}'}.", field=field)
    return int(value)


def require_no_episode(in_episode: bool) -> None:
    """
    Raises:
        RequestRejected: 409; the environment's verifier alone decides what an episode is worth.
    """
    if in_episode:
        message = "This turn is an episode's: its environment's verifier alone decides its reward, it cannot be rated."
        raise RequestRejected(message, status=409, code="rated_by_verifier")


def is_htmx(request: Request) -> bool:
    return "hx-request" in request.headers


def _problem_page(request: Request, problem: Problem, change_unknown: bool = False) -> Response:
    headers = {} if problem.retry_after is None else {"Retry-After": problem.retry_after}
    if problem.code == "login_required":
        if is_htmx(request):
            return Response(status_code=401, headers={"HX-Redirect": "/ui/login"})
        # A strict cookie stays behind when a link elsewhere leads here; from our own page it comes along.
        if request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site":
            return render(request, "again.html")
        return RedirectResponse("/ui/login", 303)
    shown = {"problem": problem, "change_unknown": change_unknown}
    login: Login | None = getattr(request.state, "login", None)
    if login is not None and problem.status != 503 and not is_htmx(request):
        policy = policy_of(services_of(request), login, request.query_params.get("policy"))
        response = render_page(request, login, "missing.html", policy, "", **shown)
        response.status_code = problem.status
    else:
        template = "_problem.html" if is_htmx(request) else "problem.html"
        response = render(request, template, problem.status, **shown)
    response.headers.update(headers)
    return response
