"""`POST /ui/compare`: the same prompt answered by a version and by its parent, side by side, as side turns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import orjson
from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message

from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.dependencies import Services, services_of
from api.errors import to_problem
from api.ui.page import PageRoute, operator, read_form, render_page
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.errors import ClawloopError, NotFound, RequestRejected
from clawloop.ids import version_name

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_CHAT_PATH = "/v1/chat/completions"
_PROMPT_CHARACTERS = 8000
# Two or three screens: enough to see how a version writes, and soon there.
_ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answered:
    """
    Args:
        text: None if it did not answer; `problem` says why.
    """

    version: int
    text: str | None
    problem: str | None = None


@router.post("/ui/compare")
async def compare(request: Request) -> Response:
    login = await operator(request)
    services = services_of(request)
    form = await read_form(request)
    prompt, number = form.get("prompt", "").strip(), form.get("version", "")
    if not 0 < len(prompt) <= _PROMPT_CHARACTERS:
        raise RequestRejected(f"A prompt has 1 to {_PROMPT_CHARACTERS:,} characters.", field="prompt")
    key = replace(login.key, scopes=login.key.scopes | {Scope.CHAT})
    versions = {str(version.n): version for version in await services.training.versions(key.policy)}
    if (version := versions.get(number)) is None or version.parent is None:
        message = f"Policy {key.policy!r} has no version {number!r} with a parent."
        raise NotFound(message, code="version_not_found", field="version")
    answers = await asyncio.gather(*(_ask(services, key, n, prompt) for n in (version.parent, version.n)))
    return render_page(request, login, "_compared.html", key.policy, "versions", answers=answers)


async def _ask(services: Services, key: ApiKey, version: int, prompt: str) -> Answered:
    policy = await services.directory.find_policy(key.policy)
    body = {
        "model": version_name(policy.id, version, policy.base_model),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _ANSWER_TOKENS,
        # The likeliest answer: what differs is the versions, not the luck of sampling.
        "temperature": 0,
    }
    try:
        exchange = ChatExchange(await prepare(services, key, Headers({"x-turn-type": "side"}), body), services)
    except ClawloopError as error:
        return Answered(version, None, to_problem(error).message)
    sent = bytearray()

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))

    async def receive() -> Message:
        return await asyncio.Future[Message]()  # the client stays

    await exchange({"type": "http", "path": _CHAT_PATH, "headers": []}, receive, send)
    answer = orjson.loads(sent)
    if (problem := answer.get("error")) is not None:
        return Answered(version, None, str(problem["message"]))
    return Answered(version, str(answer["choices"][0]["message"].get("content") or ""))
