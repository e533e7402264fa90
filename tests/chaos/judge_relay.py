"""Hands each question of the judge workers on to the engine, and remembers when it was asked, about which turn."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp import web

from clawloop.local.checks import choose_port

# In each message of a chatting user: session and number of the turn.
MARKER = re.compile(r"\bs(\d+)q(\d+)\b")


@dataclass(frozen=True, slots=True)
class Question:
    """
    Args:
        session, number: of the user's message that followed the judged reply.
        answers: how many were asked for.
        asked_at: in seconds since 1970.
    """

    session: int
    number: int
    answers: int
    asked_at: float


class JudgeRelay:
    """Use as an async context manager.

    Attributes:
        questions: in the order in which they were asked.
    """

    def __init__(self, engine_url: str, model: str) -> None:
        port = choose_port("the judge's relay", "127.0.0.1", 0, "")
        self.url = f"http://127.0.0.1:{port}"
        self.questions: list[Question] = []
        self._engine_url = engine_url
        self._model = model
        self._port = port

    async def __aenter__(self) -> JudgeRelay:
        # A question that is sent again must not meet another silent connection here: judges have no relay.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        app = web.Application(client_max_size=2**25)
        app.add_routes([web.post("/v1/chat/completions", self._relay)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _relay(self, request: web.Request) -> web.Response:
        content = await request.read()
        body = orjson.loads(content)
        marks = [(int(session), int(number)) for session, number in MARKER.findall(body["messages"][-1]["content"])]
        session, number = max(marks)
        self.questions.append(Question(session, number, body.get("n", 1), time.time()))
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{self._engine_url}/v1/chat/completions", data=content, headers=headers
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except (aiohttp.ClientError, OSError):
            return web.Response(status=503)
