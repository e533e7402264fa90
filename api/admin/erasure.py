"""`DELETE /admin/v1/sessions/{session_id}` and `/turns/{turn}`: erases content for good.

Needs the scope `admin`. Content is erased when the answer comes; idempotent. Not erased are turns that could never be
stored: their session is unknown, and they stay in `spool/gateway-*/rejected/` of the data folder until an operator
deletes them there.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.dependencies import services_of
from clawloop.contracts.serving import Scope
from clawloop.contracts.sessions import Erasure
from clawloop.errors import RequestRejected
from clawloop.ids import SessionId, turn_id_of
from clawloop.operations.applied import Applied

router = APIRouter(prefix="/admin/v1")

log = logging.getLogger(__name__)


class ContentGone(BaseModel):
    """
    Args:
        turns: how many were erased now; 0 if all were before.
        samples_expired: samples that waited for a step and were expired.
        samples_learned: samples that steps have trained, or are training: these stay in their versions.
        workflow_told: false while Temporal is away: its table shows the turns as they were.
    """

    session_id: SessionId
    turns: int
    samples_expired: int
    samples_learned: int
    workflow_told: bool


@router.delete("/sessions/{session_id}")
async def erase_session(request: Request, session_id: SessionId) -> ContentGone:
    """Erase a session's content, also what is still in a spool."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    applied = await services.session_operations.erase_session(session_id)
    if applied is None:
        raise RequestRejected(f"There is no session {session_id}.", status=404, code="not_found")
    return _erased(applied)


@router.delete("/turns/{turn}")
async def erase_turn(request: Request, turn: str) -> ContentGone:
    """Erase a turn, by its id or its reply's (`chatcmpl-…`), other replies to its request, and what continues it."""
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    turn_id = turn_id_of(turn)
    applied = None if turn_id is None else await services.session_operations.erase_turn(turn_id)
    if applied is None:
        raise RequestRejected(f"There is no turn {turn!r}.", status=404, code="not_found", field="turn")
    return _erased(applied)


def _erased(applied: Applied[Erasure]) -> ContentGone:
    if applied.signal_error is not None:
        log.warning("signal failed: Temporal shows erased turns as they were", extra={"why": applied.signal_error})
    erasure = applied.result
    return ContentGone(
        session_id=erasure.session.session_id,
        turns=erasure.turns,
        samples_expired=erasure.expired,
        samples_learned=erasure.learned,
        workflow_told=applied.signal_error is None,
    )
