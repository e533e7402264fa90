"""`/ui/upkeep/…`, `/ui/export`: the ledger's check, judging again, what was recorded."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from api.admin.export import lines_of
from api.dependencies import services_of
from api.ui.page import PageRoute, operator, policy_of, render, viewer
from clawloop.ids import SessionId
from clawloop.operations.export import ExportFilter, ExportKind

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.post("/ui/upkeep/check")
async def check_ledger(request: Request) -> Response:
    """Verify the invariants, and compare the adapters' files with their hash."""
    await operator(request)
    return render(request, "_check.html", report=await services_of(request).ledger.report(files=True))


@router.post("/ui/upkeep/unjudged")
async def judge_unjudged(request: Request) -> Response:
    await operator(request)
    turns = await services_of(request).session_operations.rejudge_unjudged()
    return _asked(request, len(turns), len([turn for turn in turns if turn.refused is not None]))


@router.post("/ui/sessions/{session_id}/judge")
async def judge_session(request: Request, session_id: SessionId) -> Response:
    await operator(request)
    services = services_of(request)
    # An id that no session has is an error, not a session without turns.
    session = await services.reading.references.session(str(session_id))
    turns = await services.session_operations.rejudge_session(session)
    return _asked(request, len(turns), len([turn for turn in turns if turn.refused is not None]))


@router.get("/ui/export")
async def export(request: Request, records: ExportKind, policy: str | None = None) -> Response:
    """A file with what was recorded; as `GET /admin/v1/export`, with the login for a key."""
    login = await viewer(request)
    services = services_of(request)
    chosen = policy_of(services, login, policy)
    pages = services.exporter.pages(records, ExportFilter(chosen, None, None, None), None)
    # Read before the status is sent, so that a database that is away is a 503.
    first = await anext(pages, None)
    headers = {"Content-Disposition": f'attachment; filename="{records.value}.jsonl"'}
    return StreamingResponse(lines_of(first, pages), media_type="application/x-ndjson", headers=headers)


def _asked(request: Request, turns: int, refused: int) -> Response:
    note = f"{turns - refused} turns are judged again; their places show the results."
    if refused:
        note += f" {refused} cannot be."
    return render(request, "_note.html", note=note)
