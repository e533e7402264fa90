"""`/admin/v1`: what an operator sees and changes. Needs a key with the scope `admin`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from api.dependencies import services_of
from clawloop.contracts.serving import Scope
from clawloop.contracts.sessions import SessionState
from clawloop.contracts.views import SessionView, TurnView
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId

router = APIRouter(prefix="/admin/v1")


class EngineStatus(BaseModel):
    id: str
    url: str
    healthy: bool
    draining: bool
    versions: dict[str, list[int]]


class EngineList(BaseModel):
    engines: list[EngineStatus]


@router.get("/engines")
async def list_engines(request: Request) -> EngineList:
    """The engines this gateway knows, and which of them answer."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    healthy = services.engines.healthy()
    return EngineList(
        engines=[
            EngineStatus(
                id=engine.id,
                url=engine.url,
                healthy=engine.id in healthy,
                draining=engine.draining,
                versions={policy: sorted(versions) for policy, versions in engine.versions.items()},
            )
            for engine in services.directory.snapshot.engines
        ]
    )


class SessionPage(BaseModel):
    """
    Args:
        next: give it as `after` for the next page; None if this is the last one.
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
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    # One more than asked for tells whether there is another page.
    found = await services.sessions.sessions(policy=policy, state=state, after=after, limit=limit + 1)
    page = found[:limit]
    return SessionPage(sessions=page, next=page[-1].id if len(found) > limit else None)


@router.get("/sessions/{session_id}")
async def show_session(request: Request, session_id: SessionId) -> SessionDetail:
    """A session with all its turns, each with what became of it and why."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    session = await services.sessions.session(session_id)
    if session is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return SessionDetail(session=session, turns=await services.sessions.turns(session_id))
