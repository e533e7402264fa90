"""`GET /admin/v1/export`: recorded data, one JSON object a line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from api.dependencies import admin_services
from clawloop.operations.export import ExportFilter, ExportKind, Record

router = APIRouter(prefix="/admin/v1", tags=["sessions"])


_LINES = {"schema": {"type": "string", "description": "JSON lines."}}


@router.get("/export", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": _LINES}}})
async def export(
    request: Request,
    records: Annotated[ExportKind, Query(description="what one line is")] = ExportKind.TURNS,
    policy: str | None = None,
    session: Annotated[
        str | None, Query(description="an id or its beginning, the client's own id, a reply's id, or `last`")
    ] = None,
    since: datetime | None = None,
    until: datetime | None = None,
    after: Annotated[UUID | None, Query(description="the `id` of the last line that is there")] = None,
    files: Annotated[
        bool, Query(description="messages have their images themselves, as data URLs, in place of references")
    ] = False,
) -> StreamingResponse:
    """Records by ascending id, streamed. One that breaks off is continued with `after`."""
    services = await admin_services(request)
    of_session = None if session is None else await services.reading.references.session(session)
    wanted = ExportFilter(policy, of_session, _aware(since), _aware(until))
    pages = services.exporter.pages(records, wanted, after, with_files=files)
    # Read before the status is sent, so that a database that is away is a 503.
    first = await anext(pages, None)
    return StreamingResponse(lines_of(first, pages), media_type="application/x-ndjson")


async def lines_of(first: list[Record] | None, pages: AsyncIterator[list[Record]]) -> AsyncIterator[bytes]:
    for record in first or ():
        yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    async for page in pages:
        for record in page:
            yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _aware(moment: datetime | None) -> datetime | None:
    """A time without a zone is UTC."""
    return moment if moment is None or moment.tzinfo is not None else moment.replace(tzinfo=UTC)
