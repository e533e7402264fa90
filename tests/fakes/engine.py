"""A fake vLLM that streams over real HTTP, in the shapes observed of vLLM 0.32.

The last word of the last message selects the behaviour, so that tests can make it fail in every way.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers.utils.chat_template_utils import render_jinja_template

from tests.fakes.replies import Deltas, Reply

# What vLLM takes as `cache_salt`.
SALT = re.compile(r"[^@/\\\0]{1,128}")
WORDS = ["Hello", " there", ",", " friend", "."]
PROMPT_IDS = [1, 2, 3]
# What gateways ask `/tokenize` of a template.
PROBE = re.compile(r"(red|blue) \d")


@dataclass
class FakeEngine:
    """
    Attributes:
        requests: bodies in order of arrival.
        authorizations: the `Authorization` header of each chat request, or None.
        traces: likewise, the `traceparent` header.
        aborted: requests, streamed or not, whose connection was closed before their end.
        healthy: the answer of /health.
        models: model names it serves; None serves all.
        delay_seconds: between tokens.
        halt: the position of the first streamed token that waits for `go_on`; None: none does.
        hold: requests are answered once it is set; None: at once.
        verbatim: the body of every answer but those of `/health` and `/v1/models`; None: a proper one.
        script: what chat requests are answered; None: by their last word.
        template: refuses chats as a model's does; None: takes every order of roles.
        context: tokens; a larger limit of the reply is refused.
        prompts: what the template rendered for each chat.
        probes: renderings that gateways asked for to learn what the template takes.
        busy: requests that `/metrics` says are computed; None: it does not say.
    """

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    traces: list[str | None] = field(default_factory=list)
    aborted: int = 0
    healthy: bool = True
    models: set[str] | None = None
    delay_seconds: float = 0.0
    halt: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event | None = None
    verbatim: bytes | None = None
    script: Callable[[dict[str, Any]], Reply] | None = None
    template: str | None = None
    context: int | None = None
    prompts: list[str] = field(default_factory=list)
    probes: int = 0
    busy: str | None = "0.0"
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def reset(self) -> None:
        self.requests.clear()
        self.authorizations.clear()
        self.traces.clear()
        self.aborted = 0
        self.delay_seconds = 0.0
        self.halt = None
        self.go_on.clear()
        self.hold = None
        self.verbatim = None
        self.script = None

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        self.traces.append(request.headers.get("traceparent"))
        if self.hold is not None:
            await self.hold.wait()
        if self.verbatim is not None:
            return self._verbatim(body)
        if (refusal := self._refusal(body)) is not None:
            return refusal
        if self.script is not None:
            return self._scripted(body, self.script(body))
        word = _last_word(body["messages"])
        match word:
            case "OVERFLOW":
                message = "This model's maximum context length is 4096 tokens. However, your prompt is longer."
                return _error(400, message, "BadRequestError", "input_text")
            case "FAIL500":
                return _error(500, "EngineCore encountered an issue.", "InternalServerError", None)
            case "HTML":
                return Response("<html>oops</html>", 502, media_type="text/html")
            case "GARBAGE" if not body.get("stream"):
                return Response("not json at all", media_type="application/json")
            case "RESET":
                raise ConnectionResetError("on purpose")
        if body.get("stream"):
            return StreamingResponse(self._stream(body, word), media_type="text/event-stream")
        if await self._disconnected_while_waiting(request):
            self.aborted += 1
            return Response(status_code=499)  # never read
        return JSONResponse(_completion(body, word))

    def _refusal(self, body: dict[str, Any]) -> Response | None:
        if self.models is not None and body["model"] not in self.models:
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError", "model")
        if self.context is not None:
            for name in ("max_completion_tokens", "max_tokens"):
                if (body.get(name) or 0) > self.context:
                    said = f"{name}={body[name]} cannot be greater than max_model_len={self.context}. "
                    return _error(400, said + "Please request fewer output tokens.", "BadRequestError", name)
        if self.template is not None:
            try:
                self.prompts.append(self._rendered(body))
            except (jinja2.TemplateError, TypeError) as error:
                return _error(400, str(error), "BadRequestError", None)
        if not SALT.fullmatch(body.get("cache_salt", "none")):
            return _error(400, "Parameter 'cache_salt' must not contain '@', '/'.", "BadRequestError", "cache_salt")
        return None

    def _scripted(self, body: dict[str, Any], reply: Reply) -> Response:
        if reply.refused is not None:
            return _error(400, reply.refused, "BadRequestError", None)
        number = next(self._numbers)
        deltas = reply.deltas(number)
        usage = _usage(_tokens_of(deltas), reply.prompt_tokens or len(PROMPT_IDS))
        if not body.get("stream"):
            ids = [token for _, tokens in deltas for token in tokens]
            choice = _chunk(body, 0, {}, ids if reply.has_ids else None, reply.finish)["choices"][0]
            del choice["delta"]
            choice["message"] = reply.message(number)
            return JSONResponse(_completion(body, "") | {"choices": [choice], "usage": usage})

        async def stream() -> AsyncIterator[bytes]:
            yield _first_event(body, 0)
            for position, (delta, ids) in enumerate(deltas):
                await self._make_token(position)
                finish = reply.finish if position == len(deltas) - 1 else None
                yield _event(_chunk(body, 0, delta, ids if reply.has_ids else None, finish))
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _event({**_chunk(body, 0, {}), "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _verbatim(self, body: dict[str, Any]) -> Response:
        media_type = "text/event-stream" if body.get("stream") else "application/json"
        return Response(self.verbatim, media_type=media_type)

    async def _disconnected_while_waiting(self, request: Request) -> bool:
        """Wait as long as a whole answer takes; True if the client disconnected meanwhile."""
        loop = asyncio.get_running_loop()
        ready = loop.time() + self.delay_seconds * len(WORDS)
        while (remaining := ready - loop.time()) > 0:
            if await request.is_disconnected():
                return True
            await asyncio.sleep(min(remaining, 0.01))
        return False

    async def _stream(self, body: dict[str, Any], word: str) -> AsyncIterator[bytes]:
        finished = False
        try:
            async for chunk in self._chunks(body, word):
                yield chunk
            finished = True
        finally:
            if not finished and word not in {"BREAK", "RESETMID"}:
                self.aborted += 1

    async def _chunks(self, body: dict[str, Any], word: str) -> AsyncIterator[bytes]:
        n = body.get("n") or 1
        for index in range(n):
            yield _first_event(body, index)
        if word == "ENDLESS":
            while True:
                yield _event(_chunk(body, 0, {"content": "x" * 65_536}, [7], None, word))
                await asyncio.sleep(0)
        deltas = _deltas(word, body.get("include_reasoning") is False)
        for position, (delta, ids) in enumerate(deltas):
            await self._make_token(position)
            if word == "BREAK" and position == 2:
                return
            if word == "RESETMID" and position == 2:
                raise ConnectionResetError("on purpose")
            if word == "GARBAGE" and position == 2:
                yield b"data: {not json\n\n"
                continue
            if word == "ERROREVENT" and position == 2:
                yield _event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
                return
            for index in range(n):
                last = position == len(deltas) - 1
                finish = ("tool_calls" if word == "TOOL" else "length" if word == "LONG" else "stop") if last else None
                yield _event(_chunk(body, index, delta, ids, finish, word))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({**_chunk(body, 0, {}), "choices": [], "usage": _usage(n * _tokens_of(_deltas(word)))})
        yield b"data: [DONE]\n\n"

    async def _make_token(self, position: int) -> None:
        await asyncio.sleep(self.delay_seconds)
        if position == self.halt:
            await self.go_on.wait()

    async def complete(self, request: Request) -> Response:
        """Plain completions: the words of a chat, without its shape."""
        body = json.loads(await request.body())
        self.requests.append(body)
        if self.verbatim is not None:
            return self._verbatim(body)
        if "prompt_logprobs" in body:
            said = [{str(token): {"logprob": -1.0, "decoded_token": f"<{token}>"}} for token in body["prompt"][1:]]
            choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *said]}
            return JSONResponse({"object": "text_completion", "choices": [choice]})
        deltas = _deltas("")
        ids = [token for _, tokens in deltas for token in tokens]
        if not body.get("stream"):
            choices = [_text_choice(body, index, "".join(WORDS), ids, "stop") for index in range(body.get("n") or 1)]
            return JSONResponse(_completion(body, "") | {"object": "text_completion", "choices": choices})

        async def stream() -> AsyncIterator[bytes]:
            for position, (delta, tokens) in enumerate(deltas):
                finish = "stop" if position == len(deltas) - 1 else None
                choice = _text_choice(body, 0, delta.get("content", ""), tokens, finish)
                yield _event(_chunk(body, 0, {}) | {"object": "text_completion", "choices": [choice]})
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _rendered(self, body: dict[str, Any]) -> str:
        """As transformers renders it; with the parts as they are where no template was set.

        Raises:
            jinja2.TemplateError, TypeError: the template refuses it.
        """
        if self.template is None:
            return json.dumps([body["messages"], body.get("tools")])
        messages = copy.deepcopy(body["messages"])
        for message in messages:
            message["content"] = message.get("content") or ""
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        (prompt,), _ = render_jinja_template(
            [messages], tools=body.get("tools"), chat_template=self.template, add_generation_prompt=True
        )
        return str(prompt)

    async def tokenize(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if any(PROBE.fullmatch(str(message.get("content"))) for message in body["messages"]):
            self.probes += 1
            try:
                return JSONResponse({"count": 1, "max_model_len": 4096, "tokens": list(self._rendered(body).encode())})
            except (jinja2.TemplateError, TypeError) as error:
                return _error(400, str(error), "BadRequestError", None)
        self.requests.append(body)
        if self.hold is not None:
            await self.hold.wait()
        if self.verbatim is not None:
            return self._verbatim(body)
        words = sum(len(str(message.get("content")).split()) for message in body["messages"])
        return JSONResponse({"count": words, "max_model_len": 4096, "tokens": list(range(words))})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": bytes(json.loads(await request.body())["tokens"]).decode()})

    async def list_models(self, request: Request) -> Response:
        names = sorted(self.models or {"tiny"})
        shared = {"object": "model"} | ({} if self.context is None else {"max_model_len": self.context})
        return JSONResponse({"object": "list", "data": [{"id": name, **shared} for name in names]})

    async def metrics(self, request: Request) -> Response:
        if self.hold is not None:
            await self.hold.wait()
        label = '{engine="0",model_name="tiny"}'
        gauges = {"num_requests_waiting_by_reason": "7.0", "num_requests_waiting": "0.0"}
        gauges |= {} if self.busy is None else {"num_requests_running": self.busy}
        if self.busy is None:
            del gauges["num_requests_waiting"]
        return Response("".join(f"# TYPE vllm:{name} gauge\nvllm:{name}{label} {n}\n" for name, n in gauges.items()))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)


def _first_event(body: dict[str, Any], index: int) -> bytes:
    first = _chunk(body, index, {"role": "assistant", "content": ""})
    if body.get("return_token_ids"):
        first |= {"prompt_token_ids": PROMPT_IDS, "prompt_text": None}
    return _event(first)


def _deltas(word: str, hides: bool = False) -> Deltas:
    if word == "TOOL":
        call = {
            "index": 0,
            "id": "chatcmpl-tool-ab12",
            "type": "function",
            "function": {"name": "exec", "arguments": ""},
        }
        return [
            ({}, [20]),
            ({"tool_calls": [call]}, [21]),
            ({"tool_calls": [{"index": 0, "function": {"arguments": '{"command": '}}]}, [22]),
            ({"tool_calls": [{"index": 0, "function": {"arguments": '"ls"}'}}]}, [23]),
            ({}, [24]),
        ]
    if word == "THINK" and hides:
        return [({"content": "Yes."}, [31]), ({}, [2])]  # vLLM hides the ids with the text
    if word == "THINK":
        return [({"reasoning": "Let me see."}, [30]), ({"content": "Yes."}, [31]), ({}, [2])]
    return [({"content": text}, [10 + index]) for index, text in enumerate(WORDS)] + [({}, [2])]


def _chunk(
    body: dict[str, Any],
    index: int,
    delta: dict[str, Any],
    ids: list[int] | None = None,
    finish: str | None = None,
    word: str = "",
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    if ids is not None:
        if word != "NOIDS" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs"):
            entries = [*ids, 99] if word == "UNEVEN" else ids
            choice["logprobs"] = {"content": [_logprob(token) for token in entries]}
    return {
        "id": "chatcmpl-engine",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body["model"],
        "choices": [choice],
    }


def _completion(body: dict[str, Any], word: str) -> dict[str, Any]:
    choices, counted = [], 0
    for index in range(body.get("n") or 1):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS), "refusal": None, "tool_calls": []}
        ids: list[int] | None = [token for _, tokens in _deltas(word) for token in tokens]
        counted += len(ids or ())
        if word == "THINK" and body.get("include_reasoning", True):
            message |= {"reasoning": "Let me see.", "content": "Yes."}
        elif word == "THINK":
            ids = None
        if word == "TOOL":
            function = {"name": "exec", "arguments": '{"command": "ls"}'}
            message |= {"content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]}
        choice = _chunk(body, index, {}, ids, "tool_calls" if word == "TOOL" else "stop", word)["choices"][0]
        del choice["delta"]
        choices.append(choice | {"message": message})
    return {
        "id": "chatcmpl-engine",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
        "usage": _usage(counted),
        "prompt_token_ids": PROMPT_IDS if body.get("return_token_ids") else None,
        "prompt_text": None,
    }


def _text_choice(body: dict[str, Any], index: int, text: str, ids: list[int], finish: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    if body.get("logprobs") is not None:
        choice["logprobs"] = {"token_logprobs": [-token / 100 for token in ids]}
    if body.get("return_token_ids"):
        choice |= {"token_ids": ids, "prompt_token_ids": PROMPT_IDS}
    return choice


def _logprob(token: int) -> dict[str, Any]:
    return {"token": str(token), "logprob": -token / 100, "bytes": [], "top_logprobs": []}


def _tokens_of(deltas: Deltas) -> int:
    return sum(len(ids) for _, ids in deltas)


def _usage(completion: int, prompt: int = len(PROMPT_IDS)) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _last_word(messages: list[Any]) -> str:
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):  # its last text
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = texts[-1] if texts else ""
    words = content.split() if isinstance(content, str) else []
    return words[-1] if words else ""


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, message: str, kind: str, param: str | None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


@asynccontextmanager
async def serving(
    app: Any, port: int = 0, http: type[asyncio.Protocol] | None = None, idle_seconds: int = 5
) -> AsyncIterator[str]:
    """Serve an ASGI app on a real port, in this event loop; yields its URL.

    Args:
        idle_seconds: after which a connection is closed.
    """
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        http=http or "auto",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=idle_seconds,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if running.done():
            await running
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()


@asynccontextmanager
async def fake_engine(port: int = 0) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    app = Starlette(
        routes=[
            Route("/v1/models", engine.list_models),
            Route("/v1/chat/completions", engine.chat, methods=["POST"]),
            Route("/v1/completions", engine.complete, methods=["POST"]),
            Route("/tokenize", engine.tokenize, methods=["POST"]),
            Route("/detokenize", engine.detokenize, methods=["POST"]),
            Route("/health", engine.health),
            Route("/metrics", engine.metrics),
        ]
    )
    async with serving(app, port) as url:
        engine.url = url
        yield engine
