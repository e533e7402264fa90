"""`POST /admin/v1/turns/{turn}/judge` and, for many turns, `/sessions/{session_id}/judge` and `/unjudged/judge`.

Has turns judged again. Needs the scope `admin`. The answer means that the session's workflow has the request; the
turn shows the result.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import services_of
from clawloop.contracts.serving import Scope
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId, TurnId, turn_id_of
from clawloop.operations.sessions import RejudgeResult

router = APIRouter(prefix="/admin/v1")


class JudgingAsked(BaseModel):
    """
    Args:
        revision: of the judgement that was asked for; asked for again before it exists, it is the same.
    """

    turn_id: TurnId
    session_id: SessionId
    revision: int


class RejudgeList(BaseModel):
    turns: list[RejudgeResult]


@router.post("/turns/{turn}/judge", status_code=202)
async def rejudge(request: Request, turn: str) -> JudgingAsked:
    """Have a turn judged again, by its id or its reply's (`chatcmpl-…`)."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    turn_id = turn_id_of(turn)
    result = None if turn_id is None else await services.session_operations.rejudge_turn(turn_id)
    if result is None:
        raise RequestRejected(f"There is no turn {turn!r}.", status=404, code="not_found", field="turn")
    if result.refused is not None:
        message = f"This turn cannot be judged again: {result.refused}."
        raise RequestRejected(message, status=409, code="cannot_judge_again", field="turn")
    return JudgingAsked(turn_id=result.turn_id, session_id=result.session_id, revision=result.revision)


@router.post("/sessions/{session_id}/judge", status_code=202)
async def rejudge_session(request: Request, session_id: SessionId) -> RejudgeList:
    """Have a session's turns judged again; `refused` says why one cannot be."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    results = await services.session_operations.rejudge_session(session_id)
    if not results:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return RejudgeList(turns=results)


@router.post("/unjudged/judge", status_code=202)
async def rejudge_unjudged(request: Request) -> RejudgeList:
    """Have turns without a valid vote judged again: the oldest 1000. Those that get a vote leave the list."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    return RejudgeList(turns=await services.session_operations.rejudge_unjudged())
