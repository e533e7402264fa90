"""A plain relay for comparison: FastAPI and httpx, bytes forwarded unparsed, nothing recorded.

Run as `python -m benchmarks.plain_relay PORT ENGINE_URL`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def relay(engine_url: str) -> FastAPI:
    app = FastAPI()
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        body = await request.body()
        upstream = client.build_request(
            "POST", f"{engine_url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )

        async def stream() -> AsyncIterator[bytes]:
            answer = await client.send(upstream, stream=True)
            async for chunk in answer.aiter_raw():
                yield chunk
            await answer.aclose()

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


if __name__ == "__main__":
    uvicorn.run(relay(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
