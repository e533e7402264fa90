"""`/healthz`: the process is alive. `/readyz`: the gateway can take traffic. `/metrics`: Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from api.dependencies import services_of
from clawloop.core.contracts.serving import Scope

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "not ready; `problems` names the reasons"}})
async def readyz(request: Request) -> JSONResponse:
    problems = await services_of(request).not_ready()
    status = "not ready" if problems else "ready"
    return JSONResponse({"status": status, "problems": problems}, 503 if problems else 200)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    server = request.scope["server"]  # the address that took the connection; None on a Unix socket
    port = None if server is None else server[1]
    services = services_of(request)
    # Gateways that share a socket ask each other on this port, which only this machine reaches.
    if port is None or port != services.health_port:
        await _require_key(request, "metrics")
    return Response(await services.metrics_page(port), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def describe(request: Request) -> JSONResponse:
    await _require_key(request, "openapi")
    return JSONResponse(request.app.openapi())


async def _require_key(request: Request, page: str) -> None:
    """
    Raises:
        RequestRejected: the page is guarded, and the key has neither the scope `read` nor `admin`.
        StoreUnavailable
    """
    services = services_of(request)
    if page in services.guarded_pages:
        await services.keys.require(request.headers, Scope.READ, Scope.ADMIN)
