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

# The end of a question for a vote or a hint, with the mark that an answer needs (`clawloop/core/judging/prompts.py`),
# and the answer.
_ENDS = {
    re.compile(rb"verdict ([0-9a-f]{6}):"): "verdict {mark}: 1",
    re.compile(rb"no hint ([0-9a-f]{6})"): "no hint {mark}",
}


async def chat(request: Request) -> Response:
    content = await request.body()
    body = orjson.loads(content)
    answers = [text.format(mark=marks[-1].decode()) for end, text in _ENDS.items() if (marks := end.findall(content))]
    if len(answers) != 1:
        return Response("this judge knows no such question", 400)
    [text] = answers
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for index in range(body.get("n", 1))
    ]
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": choices}
    return Response(orjson.dumps(answer), media_type="application/json")


async def health(request: Request) -> Response:
    return Response()


app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)])

if __name__ == "__main__":
    uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="error", access_log=False)).run()
