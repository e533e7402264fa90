"""`GET /admin/v1/files/{sha256}`: an image, or another file, of a recorded message."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.dependencies import Services, admin_services
from clawloop.errors import RequestRejected
from clawloop.turns.pictures import picture_type

router = APIRouter(prefix="/admin/v1", tags=["sessions"])

Sha256 = Annotated[
    str, Path(description="the `sha256` of a reference in a message", pattern="^[0-9a-f]{64}$", examples=["0" * 64])
]
# A client chose the bytes: a browser runs none of them, and takes them for nothing but what their header says.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # it may be erased
}


@router.get("/files/{sha256}", response_class=Response)
async def show_file(request: Request, sha256: Sha256) -> Response:
    """The file itself: PNG, JPEG, WebP and GIF as images, all else as a download."""
    return await file_response(await admin_services(request), sha256)


async def file_response(services: Services, sha256: str) -> Response:
    """
    Raises:
        RequestRejected: 404; there is no such file, or its last turn was erased.
        StoreUnavailable
    """
    content = await services.files.read(sha256)
    if content is None:
        raise RequestRejected(
            f"There is no file {sha256[:12]}…, or the turns that had it were erased.", status=404, code="not_found"
        )
    shown = picture_type(content)
    disposition = "inline" if shown else f'attachment; filename="{sha256[:12]}.bin"'
    return Response(
        content,
        headers=_HEADERS | {"Content-Disposition": disposition},
        media_type=shown or "application/octet-stream",
    )
