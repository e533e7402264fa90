"""`POST /admin/v1/turns/{turn}/judge` and, for many turns, `/sessions/{session_id}/judge` and `/unjudged/judge`.

Has turns judged again. Needs the scope `admin`. The answer means that the session's workflow has the request; the
turn shows the result. `GET /admin/v1/judge/precision` compares votes with outcomes.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from api.admin.sessions import SessionReference, TurnReference
from api.dependencies import admin_services
from clawloop.contracts.answers import Rejudged, RejudgeList
from clawloop.errors import RequestRejected
from clawloop.operations.precision import JudgePrecision, judge_precision

router = APIRouter(prefix="/admin/v1", tags=["judging"])


@router.post("/turns/{turn}/judge", status_code=202)
async def rejudge(request: Request, turn: TurnReference) -> Rejudged:
    """Have a turn judged again, by its id or its reply's (`chatcmpl-…`)."""
    services = await admin_services(request)
    turn_id = await services.reading.references.turn(turn)
    result = await services.session_operations.rejudge_turn(turn_id)
    if result is None:  # a turn of an episode: its rollout group alone decides
        raise RequestRejected(
            "A turn of an episode is not judged again.", status=409, code="cannot_judge_again", field="turn"
        )
    if result.refused is not None:
        message = f"This turn cannot be judged again: {result.refused}."
        raise RequestRejected(message, status=409, code="cannot_judge_again", field="turn")
    return result


@router.post("/sessions/{session_id}/judge", status_code=202)
async def rejudge_session(request: Request, session_id: SessionReference) -> RejudgeList:
    """Have a session's turns judged again; `refused` says why one cannot be."""
    services = await admin_services(request)
    session = await services.reading.references.session(session_id)
    return RejudgeList(turns=await services.session_operations.rejudge_session(session))


@router.get("/judge/precision")
async def show_precision(request: Request, policy: str = "default") -> JudgePrecision:
    """Agreement of votes on episodes' turns with the episodes' rewards, by the number of votes in a verdict."""
    services = await admin_services(request)
    return await judge_precision(services.votes, policy)


@router.post("/unjudged/judge", status_code=202)
async def rejudge_unjudged(request: Request) -> RejudgeList:
    """Have turns without a valid vote judged again: the oldest 1000. Those that get a vote leave the list."""
    services = await admin_services(request)
    return RejudgeList(turns=await services.session_operations.rejudge_unjudged())
