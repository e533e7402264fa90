"""`GET /ui/sessions`: sessions found by what was said and decided in them, and each as a chat."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.dependencies import services_of
from api.ui.page import (
    PageRoute,
    is_htmx,
    operator,
    policy_of,
    read_form,
    render,
    render_page,
    require_no_episode,
    version_number,
    viewer,
)
from api.ui.wording import OUTCOMES
from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.contracts.views import SessionDetail, SessionFilter
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId, TurnId

router = APIRouter(route_class=PageRoute, include_in_schema=False)

SESSIONS_ON_A_PAGE = 50
TURNS_ON_A_PAGE = 50
# PostgreSQL counts turns in 64 bits; no session has as many pages.
LARGEST_PAGE = 2**31 - 1
Choice = TypeVar("Choice", bound=StrEnum)
_VERDICTS = {"praised": 1, "neutral": 0, "blamed": -1}
_FIELDS = ("text", "verdict", "outcome", "kind", "state", "version")


@router.get("/ui/sessions")
async def list_sessions(
    request: Request,
    policy: str | None = None,
    text: Annotated[str, Query(max_length=200)] = "",
    verdict: str = "",
    outcome: str = "",
    kind: str = "",
    state: str = "",
    version: str = "",
    after: SessionId | None = None,
) -> Response:
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    wanted = SessionFilter(
        policy=chosen,
        text=text.strip() or None,
        verdict=_VERDICTS.get(verdict),
        judged=False if verdict == "none" else None,
        outcome=_one_of(TurnOutcome, outcome, "outcome"),
        # A client's own side turns would hide the conversations, unless something is looked for.
        kind=_one_of(TurnKind, kind, "kind")
        if kind or verdict or outcome or version or text.strip()
        else TurnKind.MAIN,
        state=_one_of(SessionState, state, "state"),
        version=version_number(version) if version else None,
    )
    found = await services.reading.page(wanted, after=None if after is None else str(after), limit=SESSIONS_ON_A_PAGE)
    filters = {name: request.query_params.get(name, "") for name in _FIELDS}
    further = {name: value for name, value in (filters | {"policy": policy or ""}).items() if value}
    template = "_session_list.html" if is_htmx(request) and "hx-boosted" not in request.headers else "sessions.html"
    return render_page(
        request,
        login,
        template,
        chosen,
        "sessions",
        sessions=found.sessions,
        filters=filters,
        outcomes=OUTCOMES,
        more=None if found.next is None else urlencode(further | {"after": found.next}),
        is_first=after is None,
    )


@router.get("/ui/sessions/{session_id}")
async def show_session(
    request: Request,
    session_id: str,
    page: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 1,
    turn: TurnId | None = None,
) -> Response:
    login = await viewer(request)
    services = services_of(request)
    session = await services.reading.references.session(session_id)
    if turn is not None:
        page = await services.reading.position(session, turn) // TURNS_ON_A_PAGE + 1
    chat = await services.reading.session_from(session, (page - 1) * TURNS_ON_A_PAGE, TURNS_ON_A_PAGE)
    template = "_chat.html" if is_htmx(request) and "hx-boosted" not in request.headers else "session.html"
    return render_page(request, login, template, chat.session.policy, "sessions", note=None, **on_page(chat, page))


def on_page(chat: SessionDetail, page: int) -> dict[str, Any]:
    """Variables of a chat's template: turns with their messages, and their places in the session."""
    total = chat.session.main_turns + chat.session.side_turns
    return {
        "session": chat.session,
        "chat": list(zip(chat.turns, chat.conversation or (), strict=True)),
        "first": (page - 1) * TURNS_ON_A_PAGE,
        "total": total,
        "page": page,
        "pages": max(1, -(-total // TURNS_ON_A_PAGE)),
    }


@router.post("/ui/sessions/{session_id}/outcome")
async def give_outcome(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    services = services_of(request)
    form = await read_form(request)
    if form.get("outcome") not in ("1", "-1"):
        raise RequestRejected("The outcome is 1 or -1.", field="outcome")
    session = (await services.reading.session(str(session_id), limit=1)).session
    require_no_episode(session.episode_id is not None)
    effect = await services.feedback.give_outcome(session.key_id, str(session_id), int(form["outcome"]))
    if effect is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    told = "succeeded" if form["outcome"] == "1" else "failed"
    return render(request, "_note.html", note=f"Recorded: its task {told} ({effect.value.replace('_', ' ')}).")


@router.post("/ui/sessions/{session_id}/erase")
async def erase_session(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    applied = await services_of(request).session_operations.erase_session(session_id)
    if applied is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    erased = applied.result
    note = f"{erased.turns} turns are erased; {erased.expired} waiting samples expired."
    if erased.learned:
        note += f" {erased.learned} samples had been trained: their versions keep what they learned."
    response = render(request, "_note.html", note=note)
    response.headers["HX-Trigger"] = "changed"  # the chat beside it loads itself anew
    return response


def _one_of(choices: type[Choice], value: str, field: str) -> Choice | None:
    try:
        return choices(value) if value else None
    except ValueError:
        raise RequestRejected(f"`{field}` cannot be {value!r}.", field=field) from None
