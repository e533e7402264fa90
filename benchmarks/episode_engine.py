"""A stub engine for episodes of `tests/environments/foreign/vf_sums.py`: says "wait" once, then the sum.

Run as `python -m benchmarks.episode_engine PORT TOKENS MILLISECONDS_PER_TOKEN`. Every answer, streamed or not, lasts as
long as so many tokens take; what it says is its first token, the others are empty. It answers in vLLM's format.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import orjson
from aiohttp import web

_SUM = re.compile(r"(\d+) \+ (\d+)")


class EpisodeEngine:
    def __init__(self, tokens: int, pause_seconds: float) -> None:
        self._tokens = tokens
        self._pause_seconds = pause_seconds
        self._rest = [self._chunk("", 2 + token, token == tokens - 1) for token in range(1, tokens)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        said = _said(body["messages"])
        if not body.get("stream"):
            await asyncio.sleep(self._tokens * self._pause_seconds)
            return web.json_response(self._whole(said))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, chunk in enumerate([self._chunk(said, 1, self._tokens == 1), *self._rest], start=1):
            # By the clock: a sleep that ends late must not slow the whole answer down.
            await asyncio.sleep(max(0.0, began + number * self._pause_seconds - loop.time()))
            await reply.write(chunk)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _whole(self, said: str) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": said},
            "finish_reason": "stop",
            "token_ids": list(range(1, self._tokens + 1)),
            "logprobs": {"content": [_logprob(said if token == 0 else "") for token in range(self._tokens)]},
        }
        usage = {"prompt_tokens": 3, "completion_tokens": self._tokens, "total_tokens": 3 + self._tokens}
        return _answer("chat.completion", choice) | {"prompt_token_ids": [1, 2, 3], "usage": usage}

    def _chunk(self, text: str, token: int, is_last: bool) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": text},
            "finish_reason": "stop" if is_last else None,
            "token_ids": [token],
            "logprobs": {"content": [_logprob(text)]},
        }
        first = {"prompt_token_ids": [1, 2, 3]} if token == 1 else {}
        return b"data: " + orjson.dumps(_answer("chat.completion.chunk", choice) | first) + b"\n\n"


def _said(messages: list[dict[str, Any]]) -> str:
    if len(messages) == 1:
        return "wait"
    found = _SUM.search(messages[0]["content"])
    assert found is not None
    return str(int(found[1]) + int(found[2]))


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-x", "object": kind, "created": 1, "model": "tiny", "choices": [choice]}


def _logprob(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}


async def ok(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


def main(port: int, tokens: int, pause_seconds: float) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", EpisodeEngine(tokens, pause_seconds).chat)
    app.router.add_get("/health", ok)
    app.router.add_get("/v1/models", ok)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000)
