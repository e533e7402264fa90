"""Hands each question of the judge workers on to the engine, and remembers when it was asked, about which turn."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from clawloop.app.local.checks import choose_port
from clawloop.core.judging.records import DIRECT, HINTS, VOTES
from tests.fakes.judge import BLOCK

# In each message of a chatting user: session and number of the turn.
_MARKER = re.compile(r"\bs(\d+)q(\d+)\b")


@dataclass(frozen=True, slots=True)
class Question:
    """
    Args:
        kind: `VOTES`, `DIRECT` or `HINTS`.
        session: the number of the chatting user; None: it is about another client's turn.
        mark: that of the judged turn, by which the prompt separates its blocks.
        answers: how many were asked for.
        asked_at: in seconds since 1970.
    """

    kind: str
    session: int | None
    mark: str
    answers: int
    asked_at: float


class JudgeRelay:
    """Use as an async context manager.

    Attributes:
        questions: in the order in which they were asked.
        unknown: those that no check can compare with answers.
    """

    def __init__(self, engine_url: str, model: str) -> None:
        port = choose_port("the judge's relay", "127.0.0.1", 0, "")
        self.url = f"http://127.0.0.1:{port}"
        self.questions: list[Question] = []
        self.unknown: list[str] = []
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
        asked = body["messages"][-1]["content"]
        tags = BLOCK.search(asked)
        if tags is None or "structured_outputs" not in body:
            self.unknown.append(f"a question to the judge in another form: {asked[:200]!r}")
        else:
            self.questions.append(Question(_kind(body), session_of(asked), tags[1], body.get("n", 1), time.time()))
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{self._engine_url}/v1/chat/completions", data=content, headers=headers
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except (aiohttp.ClientError, OSError):
            return web.Response(status=503)


def session_of(messages: str) -> int | None:
    """The number of the chatting user in whose messages this is; None: it is none's."""
    marker = _MARKER.search(messages)
    return None if marker is None else int(marker[1])


def _kind(body: dict[str, Any]) -> str:
    """What is asked for, by the form that its answer must have: judges of this stack answer by grammar."""
    if "choice" not in body["structured_outputs"]:
        return HINTS
    return DIRECT if body.get("logprobs") else VOTES
