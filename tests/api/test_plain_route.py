"""A route that takes the request alone goes past FastAPI's dependencies; another one does not."""

from __future__ import annotations

import httpx
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse

from api.plain_route import PlainRoute

router = APIRouter(route_class=PlainRoute)


@router.post("/plain")
async def plain(request: Request) -> JSONResponse:
    """A plain one."""
    return JSONResponse({"stacks": "fastapi_function_astack" in request.scope})


@router.get("/named/{name}")
async def named(request: Request, name: str) -> JSONResponse:
    return JSONResponse({"name": name, "stacks": "fastapi_function_astack" in request.scope})


async def test_only_a_route_that_takes_the_request_alone_is_plain() -> None:
    app = FastAPI()
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert (await client.post("/plain")).json() == {"stacks": False}
        assert (await client.get("/named/x")).json() == {"name": "x", "stacks": True}
        assert (await client.get("/openapi.json")).json()["paths"]["/plain"]["post"]["description"] == "A plain one."
