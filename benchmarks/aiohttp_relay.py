"""A relay for comparison, which records nothing: Starlette as server, aiohttp as client.

Run as `python -m benchmarks.aiohttp_relay PORT ENGINE_URL raw|parsing`. `raw` forwards bytes; `parsing` parses each
event and takes token ids and log-probs out, as a gateway has to.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from clawloop.serving.events import event_data

_EVENT_LIMIT_BYTES = 16 * 1024 * 1024


def relay(engine_url: str, *, parsing: bool) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
            app.state.client = client
            yield

    async def chat(request: Request) -> Response:
        body = await request.body()
        if parsing:
            body = orjson.dumps(orjson.loads(body) | {"logprobs": True, "return_token_ids": True})

        async def stream() -> AsyncIterator[bytes]:
            client: aiohttp.ClientSession = request.app.state.client
            url, headers = f"{engine_url}/v1/chat/completions", {"Content-Type": "application/json"}
            async with client.post(url, data=body, headers=headers) as answer:
                if not parsing:
                    async for piece in answer.content.iter_any():
                        yield piece
                    return
                async for arrived in event_data(answer.content.iter_any(), _EVENT_LIMIT_BYTES):
                    for data in arrived:
                        yield b"data: " + (data if data == b"[DONE]" else orjson.dumps(_stripped(data))) + b"\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response()

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/healthz", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def _stripped(data: bytes) -> object:
    chunk = orjson.loads(data)
    chunk.pop("prompt_token_ids", None)
    for choice in chunk["choices"]:
        choice.pop("token_ids", None)
        choice.pop("logprobs", None)
    return chunk


if __name__ == "__main__":
    port, url, how = sys.argv[1:]
    config = uvicorn.Config(
        relay(url, parsing=how == "parsing"), port=int(port), log_level="error", access_log=False, loop="asyncio"
    )
    uvicorn.Server(config).run()
