"""`GET /ui/events`: server-sent events say when to look again; and `GET /ui/files/{sha256}`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from api.admin.sessions import Sha256, file_response
from api.dependencies import Services, services_of
from api.ui.changes import AWAY, CHECK_SECONDS
from api.ui.logins import Login
from api.ui.page import PageRoute, viewer

# Events ---------------------------------------------------------------------------------------------------------------
# `GET /ui/events`: server-sent events say when to look again, and if no engine answers; they end when a gateway drains.

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# Shorter than the minute after which proxies close a silent connection.
_SILENT_SECONDS = 20.0
# Pages say how long ago things were, in minutes.
AGING_SECONDS = 60.0


@router.get("/ui/events")
async def events(request: Request) -> Response:
    login = await viewer(request, needs_store=False)
    headers = {"X-Accel-Buffering": "no"}  # nginx passes each event on at once
    stream = _events(services_of(request), login)
    return StreamingResponse(stream, headers=headers, media_type="text/event-stream")


async def _events(services: Services, login: Login) -> AsyncIterator[str]:
    # A browser connects again by itself, to another gateway if this one drains.
    yield "retry: 2000\n\n"
    seen: str | None = None
    silent_since = looked_at = time.monotonic()
    while not services.is_draining() and time.time() < login.expires:
        mark = await services.changes.mark()
        if mark != seen or time.monotonic() - looked_at > AGING_SECONDS:
            # The first one says that the connection stands: what changed before it was made is looked at as well.
            silent = "" if services.engines.healthy() else "nothing answers"
            yield "event: away\ndata: \n\n" if mark == AWAY else f"event: changed\ndata: {silent}\n\n"
            seen, silent_since, looked_at = mark, time.monotonic(), time.monotonic()
        elif time.monotonic() - silent_since > _SILENT_SECONDS:
            yield ": here\n\n"
            silent_since = time.monotonic()
        await asyncio.sleep(CHECK_SECONDS)


# Files of messages ----------------------------------------------------------------------------------------------------
# `GET /ui/files/{sha256}`: an image, or another file, of a message that the page shows.


@router.get("/ui/files/{sha256}")
async def show_file(request: Request, sha256: Sha256) -> Response:
    await viewer(request)
    return await file_response(services_of(request), sha256)
