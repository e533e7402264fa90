"""A gateway whose replies are scripted, for agents in real sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[list[dict[str, Any]]], dict[str, Any]]


@asynccontextmanager
async def model(reply: Reply, tool: str = "python") -> AsyncIterator[tuple[str, int]]:
    """A gateway that answers each request by `reply` to its messages.

    Args:
        tool: that requests must offer.
    """

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        body = await request.json()
        assert body["tools"][0]["function"]["name"] == tool
        message = {"role": "assistant", **reply(body["messages"])}
        finish = message.pop("finish_reason", "stop")
        return web.json_response({"choices": [{"message": message, "finish_reason": finish}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield host, port
    finally:
        await runner.cleanup()


def python_call(code: str) -> dict[str, Any]:
    return _call("python", {"code": code})


def bash_call(command: str) -> dict[str, Any]:
    return _call("bash", {"command": command})


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
