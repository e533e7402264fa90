"""`GET /docs`: the API's description to read and try, from files of this package alone."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from clawloop.errors import RequestRejected

_FOLDER = Path(__file__).parent / "docs_assets"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
# Swagger UI draws its icons from data: addresses. It needs neither eval nor styles in the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Clawloop: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/initializer.js"></script>
</body>
</html>
"""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page() -> Response:
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


@router.get("/docs/{asset}")
async def asset(asset: str) -> Response:
    if (content := _FILES.get(asset)) is None:
        raise RequestRejected(f"There is no asset {asset!r}.", status=404, code="not_found")
    return Response(content, headers=_HEADERS, media_type=_TYPES[Path(asset).suffix])
