"""`GET /ui/login`: an admin key for a cookie, and back."""

from __future__ import annotations

import hmac
import secrets

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.dependencies import services_of
from api.errors import to_problem
from api.ui.logins import COOKIE, LOGIN_SECONDS
from api.ui.page import PageRoute, operator, read_form, render, viewer
from clawloop.core.errors import RequestRejected, StoreUnavailable

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# Without a login there is nothing to sign a form's token with: it is compared with a cookie of its own.
_FORM_COOKIE = "clawloop_login_form"
_FORM_SECONDS = 3600
# Largest login form, of any client: a key and a token.
_FORM_BYTES = 4096


@router.get("/ui/login")
async def show_login(request: Request) -> Response:
    return _form(request)


@router.post("/ui/login")
async def log_in(request: Request) -> Response:
    form = await read_form(request, _FORM_BYTES)
    token = request.cookies.get(_FORM_COOKIE, "")
    if not token or not hmac.compare_digest(token.encode(), form.get("token", "").encode()):
        # Also a browser that was asked again after an hour, so it gets a new form.
        message = "This form is too old, or cookies are off. Try again."
        return _form(request, RequestRejected(message, status=403, code="csrf_rejected"))
    client = request.client.host if request.client else ""
    try:
        cookie = await services_of(request).logins.open(form.get("key", ""), client)
    except (RequestRejected, StoreUnavailable) as error:
        return _form(request, error)
    response = RedirectResponse("/ui", 303)
    response.delete_cookie(_FORM_COOKIE, path="/ui/login")
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=LOGIN_SECONDS,
        path="/ui",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/ui/logout")
async def log_out(request: Request) -> Response:
    login = await viewer(request, needs_store=False)
    if login.may_write:
        await operator(request, needs_store=False)
    response = Response(status_code=204, headers={"HX-Redirect": "/ui/login"})
    response.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")
    return response


def _form(request: Request, error: RequestRejected | StoreUnavailable | None = None) -> Response:
    problem = None if error is None else to_problem(error)
    token = secrets.token_urlsafe(24)
    response = render(request, "login.html", 200 if problem is None else problem.status, problem=problem, token=token)
    if problem is not None and problem.retry_after is not None:
        response.headers["Retry-After"] = problem.retry_after
    response.set_cookie(
        _FORM_COOKIE,
        token,
        max_age=_FORM_SECONDS,
        path="/ui/login",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
