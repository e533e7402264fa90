"""`GET /ui/files/{sha256}`: an image, or another file, of a message that the page shows."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.files import Sha256, file_response
from api.dependencies import services_of
from api.ui.page import PageRoute, viewer

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/ui/files/{sha256}")
async def show_file(request: Request, sha256: Sha256) -> Response:
    await viewer(request)
    return await file_response(services_of(request), sha256)
