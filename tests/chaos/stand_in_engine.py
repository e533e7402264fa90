"""An engine without a model: it streams, judges at random, and keeps adapters by name, as vLLM does over HTTP."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from clawloop.core.judging.hints import CONTROL_HINT
from tests.fakes.engine import PROMPT_IDS, FakeEngine, serving
from tests.fakes.judge import BLOCK, first_token
from tests.fakes.replies import Reply

SLOTS = 4
HINT = "Say it in fewer words."
LESSON = "Answer in one word."
ADDED_IDS = {9: HINT, 8: LESSON, 7: CONTROL_HINT}
_FIRST_TOKENS = ("1", "0", "-")  # of the three votes


class StandInEngine:
    """
    Args:
        script: what chat requests are answered; None: by their last word.

    Attributes:
        roots: the directory of each loaded adapter, by name.
    """

    def __init__(self, base_model: str, seed: int, script: Callable[[dict[str, Any]], Reply] | None = None) -> None:
        self.url = ""
        self.roots: dict[str, str] = {}
        self._base_model = base_model
        self._chance = random.Random(seed)
        self._chats = FakeEngine(delay_seconds=0.01, script=script)

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if answers := _answers(body):
            if body.get("logprobs"):
                return JSONResponse(first_token({token: self._chance.uniform(-3, 0) for token in _FIRST_TOKENS}))
            contents = [self._chance.choice(answers) for _ in range(body.get("n", 1))]
            choices = [{"index": index, "message": {"content": content}} for index, content in enumerate(contents)]
            return JSONResponse({"choices": choices})
        self._chats.models = {self._base_model, *self.roots}
        self._chats.requests.clear()
        return await self._chats.chat(request)

    async def complete(self, request: Request) -> Response:
        model = json.loads(await request.body())["model"]
        if model != self._base_model and model not in self.roots:
            return JSONResponse({"error": {"message": "there is no such model"}}, 404)
        return await self._chats.complete(request)

    async def tokenize(self, request: Request) -> Response:
        """The ids that the same messages had as a prompt, and others with a hint, a control or a lesson in them."""
        body = json.loads(await request.body())
        answer = json.loads(bytes((await self._chats.tokenize(request)).body))
        said = json.dumps(body["messages"])
        added = [token for token, text in ADDED_IDS.items() if text in said]
        return JSONResponse(answer | {"tokens": [*PROMPT_IDS, *added]})

    async def models(self, request: Request) -> Response:
        base = {"id": self._base_model, "root": self._base_model, "parent": None}
        adapters = [{"id": name, "root": root, "parent": self._base_model} for name, root in self.roots.items()]
        return JSONResponse({"data": [base, *adapters]})

    async def load(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if body["lora_name"] in self.roots:
            return JSONResponse({"error": {"message": "it is loaded already"}}, 400)
        self.roots[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("loaded")

    async def unload(self, request: Request) -> Response:
        name = json.loads(await request.body())["lora_name"]
        if self.roots.pop(name, None) is None:
            return JSONResponse({"error": {"message": "it is not loaded"}}, 404)
        return PlainTextResponse("unloaded")

    async def metrics(self, request: Request) -> Response:
        """Its chats wait for nothing, so that it is always idle enough to practise."""
        labels = f'max_lora="{SLOTS}",running_lora_adapters="",waiting_lora_adapters=""'
        adapters = f"vllm:lora_requests_info{{{labels}}} {time.time()}\n"
        return PlainTextResponse(f"{adapters}vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n")


def _answers(body: dict[str, Any]) -> list[str]:
    """What a judge's question is answered from; empty: it is no judge's."""
    form = body.get("structured_outputs")
    if not isinstance(form, dict) or body.get("stream"):
        return []
    if isinstance(choice := form.get("choice"), list):
        return choice
    tag = BLOCK.search(json.dumps(body["messages"])) if "regex" in form else None
    return [] if tag is None else [f"no hint {tag[1]}", f"hint {tag[1]}: {HINT}"]


@asynccontextmanager
async def stand_in_engine(
    base_model: str, seed: int, script: Callable[[dict[str, Any]], Reply] | None = None
) -> AsyncIterator[StandInEngine]:
    engine = StandInEngine(base_model, seed, script)
    async with serving_stand_in(engine):
        yield engine


@asynccontextmanager
async def serving_stand_in(engine: StandInEngine, port: int = 0) -> AsyncIterator[None]:
    """Serve it until the end of the block; afterwards it may be served again, without its adapters."""
    engine.roots.clear()

    async def health(request: Request) -> Response:
        return Response()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", engine.metrics),
            Route("/v1/models", engine.models),
            Route("/v1/completions", engine.complete, methods=["POST"]),
            Route("/v1/chat/completions", engine.chat, methods=["POST"]),
            Route("/tokenize", engine.tokenize, methods=["POST"]),
            Route("/v1/load_lora_adapter", engine.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", engine.unload, methods=["POST"]),
        ]
    )
    async with serving(app, port) as url:
        engine.url = url
        yield
