"""A judge that answers at once: `python -m benchmarks.stub_judge PORT`."""

from __future__ import annotations

import re
import sys

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MARK = re.compile(rb"verdict ([0-9a-f]{6}):")


async def chat(request: Request) -> Response:
    content = await request.body()
    body = orjson.loads(content)
    marks = _MARK.findall(content)
    text = f"verdict {marks[-1].decode()}: 1" if marks else "no hint"
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for index in range(body.get("n", 1))
    ]
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": choices}
    return Response(orjson.dumps(answer), media_type="application/json")


async def health(request: Request) -> Response:
    return Response()


if __name__ == "__main__":
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)])
    uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="error", access_log=False)).run()
