"""`DELETE /admin/v1/sessions/{session_id}` and `/turns/{turn}`: erases content for good.

Needs the scope `admin`. Content is erased when the answer comes; idempotent. Not erased are turns that could never be
stored: their session is unknown, and they stay in `spool/gateway-*/rejected/` of the data folder until an operator
deletes them there.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request

from api.admin.sessions import SessionReference, TurnReference
from api.dependencies import admin_services
from clawloop.contracts.answers import ContentGone
from clawloop.contracts.sessions import Erasure
from clawloop.operations.applied import Applied

router = APIRouter(prefix="/admin/v1", tags=["sessions"])

log = logging.getLogger(__name__)


@router.delete("/sessions/{session_id}")
async def erase_session(request: Request, session_id: SessionReference) -> ContentGone:
    """Erase a session's content, also what is still in a spool."""
    services = await admin_services(request)
    session = await services.reading.references.session(session_id)
    applied = await services.session_operations.erase_session(session)
    assert applied is not None  # rows without content stay for good
    return _erased(applied)


@router.delete("/turns/{turn}")
async def erase_turn(request: Request, turn: TurnReference) -> ContentGone:
    """Erase a turn, by its id or its reply's (`chatcmpl-…`), other replies to its request, and what continues it."""
    services = await admin_services(request)
    turn_id = await services.reading.references.turn(turn)
    applied = await services.session_operations.erase_turn(turn_id)
    assert applied is not None  # rows without content stay for good
    return _erased(applied)


def _erased(applied: Applied[Erasure]) -> ContentGone:
    if applied.signal_error is not None:
        log.warning("signal failed: Temporal shows erased turns as they were", extra={"why": applied.signal_error})
    return ContentGone.of(applied.result, workflow_told=applied.signal_error is None)
