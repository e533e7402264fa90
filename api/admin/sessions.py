"""`GET /admin/v1/sessions`: sessions and their turns."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from api.dependencies import admin_services
from clawloop.contracts.sessions import SessionState
from clawloop.contracts.views import SessionView, TurnView
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId

router = APIRouter(prefix="/admin/v1")


class SessionPage(BaseModel):
    """
    Args:
        next: the next page's `after`; None on the last page.
    """

    sessions: list[SessionView]
    next: SessionId | None


class SessionDetail(BaseModel):
    session: SessionView
    turns: list[TurnView]


@router.get("/sessions")
async def list_sessions(
    request: Request,
    policy: str | None = None,
    state: SessionState | None = None,
    after: SessionId | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> SessionPage:
    """Sessions, the one with the newest turn first."""
    services = await admin_services(request)
    # One more than the page holds shows whether there is another page.
    found = await services.sessions.sessions(policy=policy, state=state, after=after, limit=limit + 1)
    page = found[:limit]
    return SessionPage(sessions=page, next=page[-1].id if len(found) > limit else None)


@router.get("/sessions/{session_id}")
async def show_session(request: Request, session_id: SessionId) -> SessionDetail:
    """A session with all its turns, each with its outcome and the reason for it."""
    services = await admin_services(request)
    session = await services.sessions.session(session_id)
    if session is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return SessionDetail(session=session, turns=await services.sessions.turns(session_id))
