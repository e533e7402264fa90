"""`GET /admin/v1/sessions` and `/admin/v1/turns/{turn}`: sessions, their turns, and all that is stored of a turn."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from api.dependencies import admin_services
from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.contracts.views import SessionDetail, SessionFilter, SessionPage, TurnDetail, TurnView
from clawloop.operations.reading import MOST_SESSIONS, MOST_TURNS

router = APIRouter(prefix="/admin/v1", tags=["sessions"])

SessionReference = Annotated[
    str,
    Path(
        description="An id or the beginning of one, the client's own id, the id of a reply, or `last`.",
        examples=["last"],
    ),
]
TurnReference = Annotated[
    str,
    Path(
        description="An id or the beginning of one, the id of a reply (`chatcmpl-…`), `SESSION:N` for the n-th main"
        " turn of a session, or `last`.",
        examples=["last"],
    ),
]


@router.get("/sessions")
async def list_sessions(
    request: Request,
    policy: Annotated[str | None, Query(description="only sessions of this policy")] = None,
    state: Annotated[SessionState | None, Query(description="only sessions in this state")] = None,
    after: Annotated[str | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_SESSIONS)] = 50,
    fold: Annotated[
        bool, Query(description="leave out sessions without a main turn, and closed ones with a single one")
    ] = False,
    text: Annotated[
        str | None,
        Query(max_length=200, description="only sessions in which this was said, in upper or lower case"),
    ] = None,
    verdict: Annotated[int | None, Query(ge=-1, le=1, description="only those with a turn of this verdict")] = None,
    judged: Annotated[bool | None, Query(description="only those with a turn that has a verdict, or has none")] = None,
    outcome: Annotated[TurnOutcome | None, Query(description="only those with a turn of this outcome")] = None,
    kind: Annotated[TurnKind | None, Query(description="only those with a turn of this kind")] = None,
    version: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="only those with a turn that this version answered")
    ] = None,
) -> SessionPage:
    """Sessions, the one with the newest turn first. One turn has to fit all that is said of turns; `fold` is then not
    used, and `total` null."""
    services = await admin_services(request)
    wanted = SessionFilter(
        policy=policy,
        state=state,
        text=(text or "").strip() or None,
        verdict=verdict,
        judged=judged,
        outcome=outcome,
        kind=kind,
        version=version,
        fold=fold,
    )
    return await services.reading.page(wanted, after=after, limit=limit)


@router.get("/sessions/{session_id}")
async def show_session(
    request: Request,
    session_id: SessionReference,
    before: Annotated[str | None, Query(description="`earlier` of the page with later turns")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_TURNS, description="at most so many turns, the newest ones")] = 500,
    content: Annotated[bool, Query(description="also what was said, the judges' answers and feedback")] = False,
) -> SessionDetail:
    """A session with its turns, each with its outcome and the reason for it."""
    services = await admin_services(request)
    return await services.reading.session(session_id, before=before, limit=limit, content=content)


@router.get("/turns/{turn}")
async def show_turn(
    request: Request,
    turn: TurnReference,
    tokens: Annotated[bool, Query(description="also token ids and log-probs")] = False,
) -> TurnDetail:
    """A turn with its messages, response, votes, hints, feedback and sample."""
    services = await admin_services(request)
    return await services.reading.detail(turn, tokens=tokens)


@router.get("/turns/{turn}/why")
async def explain_turn(request: Request, turn: TurnReference) -> TurnView:
    """A turn's outcome and the reason, without what was said."""
    services = await admin_services(request)
    return await services.reading.turn(turn)
