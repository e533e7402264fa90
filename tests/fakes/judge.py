"""A judge over real HTTP whose answers are scripted, and an engine's `/tokenize`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawloop.core.judging.hints import LEAD_IN
from tests.fakes.engine import serving

# The first tag of a question, with its mark.
BLOCK = re.compile(r"<(?:task|reply|next|history|feedback) ([0-9a-f]{6}) ")


def _open() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class FakeJudge:
    """
    Attributes:
        votes: the next votes; the last one is repeated. A string is sent unchanged.
        hint: the hint of each answer; None: no hint.
        relation: of a new lesson to those that are there.
        withheld: how many of the first answers give no hint.
        mode: `well`, or how it fails: a status like `429`, `hang`, `nonsense`, `html`, `huge`, `one` (ignores n).
        gate: answers wait for it.
        leaving: ends requests that hang, so that the server can stop.
        requests: bodies of all questions, in order.
        says: gives the answer instead, from the body and the question.
        records: the judge is behind a gateway, which records these answers and gives the id of its reply.
        direct: log-probs of the first token where they are asked for; None: not reported.
        prompt_ids, hinted_ids: the ids /tokenize returns for a prompt without and with a hint.
        context_tokens: the limit of a chat that /tokenize returns.
        rendered: the text of a chat that /tokenize returns, without thinking and with it; None: no text.
        cut: of how many further answers the limit of tokens ends.
        takes_budget: a thinking budget is accepted.
        sees: a question with images is accepted.
        listed: the model of /v1/models; None: there is no such route.
    """

    url: str = ""
    votes: list[int | str] = field(default_factory=lambda: [1])
    hint: str | None = None
    relation: str = "new"
    withheld: int = 0
    mode: str = "well"
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    retry_after: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    hinted_ids: list[int] = field(default_factory=lambda: [1, 2, 9, 3])
    context_tokens: int = 4096
    rendered: tuple[str, str] | None = None
    refuses_to_render: tuple[int, str] | None = None
    cut: int = 0
    takes_budget: bool = True
    max_characters: int | None = None
    sees: bool = True
    listed: dict[str, Any] | None = None
    gate: asyncio.Event = field(default_factory=_open)
    says: Callable[[dict[str, Any], str], str] | None = None
    records: Callable[[list[str]], Awaitable[str]] | None = None
    direct: dict[str, float] | None = field(default_factory=lambda: {"1": -0.2, "-": -2.0, "0": -3.0})

    def asked(self, what: str) -> list[dict[str, Any]]:
        """The questions for votes, hints or the relation of a lesson to others."""
        words = {"vote": "You judge one reply", "hint": "You find out", "relation": "You keep notes"}[what]
        return [body for body in self.requests if str(body["messages"][0]["content"]).startswith(words)]

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        mode = self.mode  # a test may change it as soon as it sees the request
        self.requests.append(body)
        await self.gate.wait()
        question = _text_of(body["messages"][-1]["content"])
        match mode:
            case "hang":
                await self.leaving.wait()
            case "html":
                return Response("<html>oops</html>", 200, media_type="text/html")
            case "shapeless":
                return JSONResponse({"choices": [{"text": "no chat"}]})
            case "huge":
                return JSONResponse(_completion(["x" * (10 * 2**20)]))
            case _ if mode.isdigit():
                headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
                return JSONResponse({"error": {"message": f"no: {question}"}}, int(mode), headers)
        if not self.sees and isinstance(body["messages"][-1]["content"], list):
            return JSONResponse({"error": {"message": "this is not a multimodal model", "code": 400}}, 400)
        if self.max_characters is not None and len(question) > self.max_characters:
            error = {"message": "This model's maximum context length is 4096 tokens.", "code": 400}
            return JSONResponse({"error": error}, 400)
        if "thinking_token_budget" in body and not self.takes_budget:
            return JSONResponse({"error": {"message": "reasoning_config is not configured", "code": 400}}, 400)
        if "logprobs" in body:
            return JSONResponse(first_token(self.direct))
        return await self._answers(body, question)

    async def _answers(self, body: dict[str, Any], question: str) -> Response:
        n = 1 if self.mode == "one" else body.get("n", 1)
        answer = _completion([self._answer(body, question) for _ in range(n)])
        for choice in answer["choices"]:
            if self.cut > 0:
                choice["finish_reason"] = "length"
                self.cut -= 1
        if self.records is None:
            return JSONResponse(answer)
        answer["id"] = await self.records([choice["message"]["content"] for choice in answer["choices"]])
        return JSONResponse(answer, headers={"X-Clawloop-Version": "0"})

    def _answer(self, body: dict[str, Any], question: str) -> str:
        if self.says is not None:
            return self.says(body, question)
        found = BLOCK.search(question)
        mark = found[1] if found else "000000"
        if str(body["messages"][0]["content"]).startswith("You find out"):
            self.withheld -= 1
            return f"no hint {mark}" if self.hint is None or self.withheld >= 0 else f"hint {mark}: {self.hint}"
        if str(body["messages"][0]["content"]).startswith("You keep notes"):
            asked = re.search(r'"note (\w+):', question)
            return self.relation if asked is None else f"I compared them.\nnote {asked[1]}: {self.relation}"
        vote = self.votes.pop(0) if len(self.votes) > 1 else self.votes[0]
        if isinstance(vote, str):
            return vote
        return str(vote) if "structured_outputs" in body else f"I thought about it.\nverdict {mark}: {vote}"

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [self.listed]} if self.listed else {}, 200 if self.listed else 404)

    async def tokenize(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.tokenized.append(body)
        if self.refuses_to_render is not None and "return_token_strs" in body:
            status, message = self.refuses_to_render
            return JSONResponse({"error": {"message": message, "code": status}}, status)
        asked = json.dumps(body["messages"])
        hinted = LEAD_IN.strip() in asked or "\\n\\n" in asked  # behind a lead-in, or said before the request
        tokens = self.hinted_ids if hinted else self.prompt_ids
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self.context_tokens, "tokens": tokens}
        if self.rendered is not None and body.get("return_token_strs"):
            text = self.rendered[body["chat_template_kwargs"]["enable_thinking"]]
            answer["token_strs"] = list(text.replace(" ", "Ġ"))
        return JSONResponse(answer)


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """The question, which comes after the images."""
    return content if isinstance(content, str) else str(content[-1]["text"])


def first_token(logprobs: dict[str, float] | None) -> dict[str, Any]:
    """A completion of one token, as vLLM reports it."""
    answer = _completion([""])
    if logprobs is not None:
        top = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in logprobs.items()]
        answer["choices"][0]["logprobs"] = {"content": [{"token": "1", "logprob": -0.2, "top_logprobs": top}]}
    return answer


def _completion(texts: list[str]) -> dict[str, Any]:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": choices}


@asynccontextmanager
async def fake_judge() -> AsyncIterator[FakeJudge]:
    judge = FakeJudge()
    routes = [
        Route("/v1/chat/completions", judge.chat, methods=["POST"]),
        Route("/v1/models", judge.models),
        Route("/tokenize", judge.tokenize, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes)) as url:
        judge.url = url
        try:
            yield judge
        finally:
            judge.leaving.set()
