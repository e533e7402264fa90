"""Who plays the user and who grades in the toy's world: a model's API in front of the demo's synthetic user."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawloop.app.demo.user import SyntheticUser
from clawloop.app.demo.world import CHAT, EVALUATION, Axis, Preference, Request, grade
from clawloop.app.evaluation.settings import DONE, Setting, SettingName
from clawloop.app.evaluation.tasks import Task
from tests.fakes.engine import serving

SETTING = Setting(
    name=SettingName.TEACHER,
    sessions=24,
    opening=lambda task, rng: task.question,
    persona="You chat with an assistant, and like one style of answers.",
    wanted="Right, and in the style that the user likes.",
)
_BY_TEXT = {request.text: request for axis in Axis for request in (*CHAT[axis], *EVALUATION)}
_GRADED = re.compile(r"<request>\n(.*?)\n</request>\n<text>\n(.*?)\n</text>", re.DOTALL)
_ANSWERS = 4


def tasks(requests: Sequence[Request]) -> list[Task]:
    """Their answers are no numbers, so none is told."""
    return [Task(request.text, "0") for request in requests]


class ToyPeople:
    """A persona that reacts as the demo's user does and ends a session after four answers, and a grader that knows the
    right answers."""

    def __init__(self, seed: int, preference: Preference) -> None:
        self._user = SyntheticUser(seed, preference)
        self._preference = preference

    async def chat(self, request: HttpRequest) -> Response:
        messages = json.loads(await request.body())["messages"]
        found = _GRADED.search(messages[0]["content"])
        text = self._says(messages) if found is None else self._grades(found[1], found[2])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    def _says(self, messages: Sequence[dict[str, Any]]) -> str:
        own = [message["content"] for message in messages if message["role"] == "assistant"]
        asked, answered = _BY_TEXT[own[-1].rpartition("\n")[2]], messages[-1]["content"]
        return self._user.follow_up(asked, answered).text if len(own) < _ANSWERS else DONE

    def _grades(self, request: str, text: str) -> str:
        return f"score: {1 if grade(_BY_TEXT[request], text, self._preference).match else 0}"


@asynccontextmanager
async def toy_people(seed: int, preference: Preference) -> AsyncIterator[str]:
    """The URL of persona and grader."""
    people = ToyPeople(seed, preference)
    async with serving(Starlette(routes=[Route("/v1/chat/completions", people.chat, methods=["POST"])])) as url:
        yield url
