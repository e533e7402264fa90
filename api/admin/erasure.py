"""`DELETE /admin/v1/sessions/{session_id}` and `/turns/{turn}`: content is taken away for good.

Needs the scope `admin`. Knows nothing about where content is. It is gone when this answers; the same may be asked
again at any time. Out of reach are turns that could never be stored: no session is known of them, and they lie whole in
`spool/gateway-*/rejected/` of the data folder until somebody deletes them there.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import Services, services_of
from clawloop.contracts.serving import Scope
from clawloop.contracts.sessions import Erasure
from clawloop.errors import RequestRejected, SignalFailed
from clawloop.ids import SessionId, turn_id_of

router = APIRouter(prefix="/admin/v1")

log = logging.getLogger(__name__)


class ContentGone(BaseModel):
    """
    Args:
        turns: how many lost their content now; 0 if all had before.
        samples_expired: how many samples waited for a step and do not any more.
        samples_learned: how many samples of it steps have learned, or are learning: that stays in their versions.
        workflow_told: false while Temporal is away: its table shows the turns as they were.
    """

    session_id: SessionId
    turns: int
    samples_expired: int
    samples_learned: int
    workflow_told: bool


@router.delete("/sessions/{session_id}")
async def erase_session(request: Request, session_id: SessionId) -> ContentGone:
    """Erase all there is of a session, and what of it is still on its way here."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    erasure = await services.erasures.erase_session(session_id)
    if erasure is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return await _told(services, erasure)


@router.delete("/turns/{turn}")
async def erase_turn(request: Request, turn: str) -> ContentGone:
    """Erase a turn, by its id or its reply's (`chatcmpl-…`), other replies to its request, and all that continue it."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    turn_id = turn_id_of(turn)
    erasure = None if turn_id is None else await services.erasures.erase_turn(turn_id)
    if erasure is None:
        raise RequestRejected(f"There is no turn {turn!r}.", status=404, code="not_found", field="turn")
    return await _told(services, erasure)


async def _told(services: Services, erasure: Erasure) -> ContentGone:
    told = True
    try:
        await services.session_operations.content_erased(erasure.session.session_id, erasure.message)
    except SignalFailed as error:
        # Nothing hangs on it: a workflow holds ids and reasons only.
        log.warning("erased, but its workflow was not told", extra={"why": str(error)})
        told = False
    return ContentGone(
        session_id=erasure.session.session_id,
        turns=erasure.turns,
        samples_expired=erasure.expired,
        samples_learned=erasure.learned,
        workflow_told=told,
    )
