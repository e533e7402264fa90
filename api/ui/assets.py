"""`GET /ui/assets/{name}`: style sheets, scripts and the icon of this folder; nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from clawloop.errors import RequestRejected

_FOLDER = Path(__file__).parent / "assets"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
ASSETS_VERSION = hashlib.sha256(b"".join(_FILES.values())).hexdigest()[:12]
"""Changes with every asset: a part of their addresses, so that browsers keep them for as long as they are the same."""

router = APIRouter(include_in_schema=False)


@router.get("/ui/assets/{name}")
async def asset(name: str) -> Response:
    if (content := _FILES.get(name)) is None:
        raise RequestRejected(f"There is no asset {name!r}.", status=404, code="not_found")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])
