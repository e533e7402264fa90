"""`/healthz`: the process is alive. `/readyz`: the gateway can take traffic. `/metrics`: Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from api.dependencies import services_of

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "not ready; `problems` names the reasons"}})
async def readyz(request: Request) -> JSONResponse:
    problems = await services_of(request).readiness.problems()
    status = "not ready" if problems else "ready"
    return JSONResponse({"status": status, "problems": problems}, 503 if problems else 200)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    server = request.scope["server"]  # the address that took the connection; None on a Unix socket
    page = await services_of(request).metrics_pages.page(None if server is None else server[1])
    return Response(page, media_type=CONTENT_TYPE_LATEST)
