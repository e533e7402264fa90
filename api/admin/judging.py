"""`POST /admin/v1/turns/{turn}/judge`: an operator has a turn judged once more. Needs the scope `admin`.

Knows nothing about judges. Taken means that the session's workflow was told; what becomes of it is seen in the turn.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import services_of
from clawloop.contracts.serving import Scope
from clawloop.contracts.sessions import RejudgeRequested
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId, TurnId, turn_id_of
from clawloop.judging.rejudging import why_not_rejudged

router = APIRouter(prefix="/admin/v1")


class JudgingAsked(BaseModel):
    """
    Args:
        revision: of the judgement that was asked for; asked for again before it is there, it is the same.
    """

    turn_id: TurnId
    session_id: SessionId
    revision: int


@router.post("/turns/{turn}/judge", status_code=202)
async def rejudge(request: Request, turn: str) -> JudgingAsked:
    """Have a turn judged once more, by its id or its reply's (`chatcmpl-…`)."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    turn_id = turn_id_of(turn)
    so_far = None if turn_id is None else await services.rejudging.rejudge_facts(turn_id)
    if so_far is None:
        raise RequestRejected(f"There is no turn {turn!r}.", status=404, code="not_found", field="turn")
    if (why := why_not_rejudged(so_far)) is not None:
        message = f"This turn cannot be judged again: {why}."
        raise RequestRejected(message, status=409, code="cannot_judge_again", field="turn")
    await services.session_operations.rejudge(so_far.session, RejudgeRequested(so_far.turn_id, so_far.next_revision))
    return JudgingAsked(turn_id=so_far.turn_id, session_id=so_far.session.session_id, revision=so_far.next_revision)
