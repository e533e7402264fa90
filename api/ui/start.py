"""`GET /ui/start`: from nothing to the first recorded chat, and a box to chat in."""

from __future__ import annotations

import re
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.dependencies import services_of
from api.request_body import read_json
from api.ui.page import PageRoute, operator, policy_of, read_form, render, render_page, viewer
from clawloop.contracts.serving import Scope
from clawloop.errors import NotFound, RequestRejected

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_NAME_CHARACTERS = 80
_CHAT_NAME = re.compile(r"page-[0-9a-f-]{8,40}")


@router.get("/ui/start")
async def start(request: Request, policy: str | None = None) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    address = f"{request.url.scheme}://{request.url.netloc}/v1"
    shown = {
        "counts": await services.training_browser.counts(chosen),
        "problems": await services.readiness.problems(),
        "temporal": await services.temporal.problem(),
    }
    return render_page(request, login, "start.html", chosen, "start", address=address, secret=None, **shown)


@router.post("/ui/keys")
async def make_key(request: Request, policy: str | None = None) -> Response:
    """Make a key for an agent; its secret is shown only once."""
    login = await operator(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    if chosen not in [known.id for known in services.directory.snapshot.policies]:
        raise NotFound(f"There is no policy {chosen!r}.", code="policy_not_found", field="policy")
    form = await read_form(request)
    name = form.get("name", "").strip()[:_NAME_CHARACTERS] or "made on the page"
    _, secret = await services.key_maker.create_key(chosen, {Scope.CHAT}, name)
    address = f"{request.url.scheme}://{request.url.netloc}/v1"
    return render_page(request, login, "_key.html", chosen, "start", address=address, secret=secret)


@router.post("/ui/chat")
async def chat(request: Request) -> Response:
    """A chat request of the box: as `POST /v1/chat/completions`, with the login for a key."""
    login = await operator(request, needs_store=False)  # chats go on without PostgreSQL
    services = services_of(request)
    body = await read_json(request, services.limits)
    key = replace(login.key, scopes=login.key.scopes | {Scope.CHAT})
    return ChatExchange(await prepare(services, key, request.headers, body), services)


@router.get("/ui/chat/{name}")
async def recorded_chat(request: Request, name: str) -> Response:
    """The recorded turns of the box's chat."""
    login = await viewer(request)
    if _CHAT_NAME.fullmatch(name) is None:
        raise RequestRejected(f"No chat of this page is called {name!r}.", status=404, code="not_found")
    reading = services_of(request).reading
    session = await reading.session_of_client(login.key.id, name)
    if session is None:
        return render(request, "_note.html", note="")
    chat = await reading.session_from(session, 0, 50)
    return render_page(request, login, "_recorded.html", login.key.policy, "start", chat=chat)
