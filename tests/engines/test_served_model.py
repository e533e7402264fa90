"""What an engine's model takes is asked to the end, whatever fails between; and whoever asks an engine sends by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawloop.app.evaluation.clients import ModelClient
from clawloop.core.contracts.serving import Directory, Engine, Policy, ServedModel
from clawloop.core.contracts.training import ProbeContent
from clawloop.core.contracts.turns import Message
from clawloop.core.families.orders import Rule
from clawloop.core.ids import new_turn_id
from clawloop.core.judging.evidence import gather
from clawloop.core.judging.prompts import AnswerForm, comparison_prompt, hint_prompt, vote_prompt
from clawloop.serving import endpoints as endpoints_module
from clawloop.serving import served_model
from clawloop.serving.endpoints import Endpoint, JsonClient
from clawloop.serving.judge import JudgeClient
from clawloop.serving.probes import ProbeClient
from clawloop.serving.served_model import ServedModels
from tests.fakes.engine import FakeEngine, fake_engine, serving

TEMPLATES = Path(__file__).parent.parent / "unit" / "families" / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
STRICT = frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE, Rule.NO_USER})


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@dataclass
class Troubled:
    """An engine that answers some renderings otherwise.

    Attributes:
        answers: for the n-th rendering and its chat, the status instead of the engine's answer, or None.
        waits: likewise, True where no answer comes.
        models: the status of `/v1/models`.
    """

    engine: FakeEngine
    url: str = ""
    models: int = 200
    seen: int = 0
    answers: Callable[[int, list[dict[str, Any]]], int | None] = lambda _, __: None
    waits: Callable[[int], bool] = lambda _: False
    asked: list[Any] = field(default_factory=list)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_models(self, request: Request) -> Response:
        return await self.engine.list_models(request) if self.models == 200 else JSONResponse({}, self.models)

    async def tokenize(self, request: Request) -> Response:
        self.seen += 1
        messages = json.loads(await request.body())["messages"]
        self.asked.append(messages)
        if self.waits(self.seen):
            await self.leaving.wait()
        status = self.answers(self.seen, messages)
        return await self.engine.tokenize(request) if status is None else JSONResponse({}, status)


@asynccontextmanager
async def troubled(name: str = "strict") -> AsyncIterator[Troubled]:
    engine = FakeEngine(template=template(name))
    server = Troubled(engine)
    routes = [
        Route("/v1/models", server.list_models),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", engine.detokenize, methods=["POST"]),
        Route("/v1/chat/completions", engine.chat, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes)) as server.url:
        try:
            yield server
        finally:
            server.leaving.set()


@dataclass
class Learner:
    models: ServedModels
    session: aiohttp.ClientSession
    url: str

    async def learn(self) -> ServedModel | None:
        return await self.models.learn(self.session, self.url, {})


@asynccontextmanager
async def learner(server: Troubled, models: ServedModels | None = None) -> AsyncIterator[Learner]:
    async with aiohttp.ClientSession() as session:
        yield Learner(models or ServedModels(), session, server.url)


@pytest.mark.parametrize("status", [401, 408, 429, 500, 502, 503, 504])
async def test_trouble_that_passes_is_no_refusal_and_the_rest_is_asked_later(status: int) -> None:
    async with troubled() as server, learner(server) as asking:
        server.answers = lambda n, _: status if n == 8 else None
        first = await asking.learn()
        if status == 500:  # asked again at once
            assert first == ServedModel(None, STRICT)
            return
        assert first is None
        assert server.seen == 8
        assert await asking.learn() == ServedModel(None, STRICT)
        assert server.asked[7] == server.asked[8]
        asked = server.seen
        assert await asking.learn() == ServedModel(None, STRICT)
        assert server.seen == asked


async def test_a_template_that_fails_on_a_chat_refuses_it() -> None:
    """Of other engines; a strict template's own refusals are 400."""
    async with troubled("qwen3_coder") as server, learner(server) as asking:
        server.answers = lambda _, messages: 500 if any(each["role"] == "developer" for each in messages) else None
        assert await asking.learn() == ServedModel(None, frozenset({Rule.DEVELOPER}))


async def test_an_engine_that_fails_on_every_chat_said_nothing() -> None:
    async with troubled("qwen3_coder") as server, learner(server) as asking:
        server.answers = lambda n, _: 500 if n > 3 else None
        assert await asking.learn() is None
        server.answers = lambda _, __: None
        assert await asking.learn() == ServedModel(None, frozenset())


async def test_an_engine_that_is_slow_is_asked_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "READ_SECONDS", 1.0)
    async with troubled() as server, learner(server) as asking:
        server.waits = lambda n: n == 6
        assert await asking.learn() is None
        assert server.seen == 6
        monkeypatch.setattr(served_model, "READ_SECONDS", 60.0)
        assert await asking.learn() == ServedModel(None, STRICT)
        assert server.asked[5] == server.asked[6]  # from where it stopped
    async with troubled() as other, learner(other) as asking:
        await asking.learn()
        assert server.seen == other.seen + 1


@pytest.mark.parametrize(("status", "known"), [(404, True), (405, True), (500, False), (401, False), (503, False)])
async def test_a_server_without_a_list_of_models_takes_every_order(status: int, known: bool) -> None:
    async with troubled() as server, learner(server) as asking:
        server.models = status
        assert await asking.learn() == (ServedModel() if known else None)


async def test_an_engine_that_may_have_restarted_is_asked_anew() -> None:
    now = [0.0]
    async with troubled() as server, learner(server, ServedModels(60.0, clock=lambda: now[0])) as asking:
        assert await asking.learn() == ServedModel(None, STRICT)
        server.engine.template = template("qwen3")
        now[0] = 59.0
        assert await asking.learn() == ServedModel(None, STRICT)
        now[0] = 61.0
        assert await asking.learn() == ServedModel(None, frozenset({Rule.DEVELOPER}))
        server.engine.template = template("qwen3_coder")
        asking.models.forget(server.url)
        assert asking.models.known(server.url) is None
        assert await asking.learn() == ServedModel(None, frozenset())


# Whoever asks an engine -----------------------------------------------------------------------------------------------

LATE: list[Message] = [
    {"role": "system", "content": "first-words"},
    {"role": "developer", "content": "second-words"},
    {"role": "user", "content": "third-words"},
    {"role": "system", "content": "fourth-words"},
]
TASK: list[Message] = [{"role": "user", "content": "task-words"}]
REPLY: Message = {"role": "assistant", "content": "reply-words"}
NEXT: list[Message] = [{"role": "user", "content": "next-words"}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
async def test_a_judge_of_each_family_is_asked_in_an_order_that_it_takes(engine: FakeEngine, name: str) -> None:
    engine.template = template(name)
    here = [Endpoint(engine.url, "tiny")]
    evidence = gather(TASK, REPLY, NEXT)
    async with JudgeClient(lambda _: here, AnswerForm.FREE, with_chats=True) as judge:
        for prompt in (
            vote_prompt(new_turn_id(), evidence),
            hint_prompt(new_turn_id(), evidence),
            comparison_prompt(new_turn_id(), TASK, "reply-words", "next-words"),
        ):
            assert await judge.answers("default", prompt, 1, 0.6)
            said = engine.prompts[-1]
            instruction = str(prompt.messages[0]["content"])
            assert instruction[:40] in said
            assert all(words in said for words in ("task-words", "reply-words", "next-words"))


@pytest.mark.parametrize("name", NAMES)
async def test_a_probe_is_sent_as_a_gateway_sends_it(engine: FakeEngine, name: str) -> None:
    engine.template = template(name)
    directory = Directory((Policy("default", "tiny", (), 0, {}),), (Engine("e1", engine.url, {}, draining=False),))
    async with ProbeClient(lambda: directory, lambda: "secret") as probes:
        await probes.answer("default", 0, ProbeContent(messages=LATE), 8)
    places = [engine.prompts[-1].find(words) for words in ("first-words", "second-words", "third-words", "fourth")]
    assert -1 not in places


@pytest.mark.parametrize("name", ["gemma3", "strict"])
async def test_the_models_of_an_evaluation_are_asked_in_an_order_that_they_take(engine: FakeEngine, name: str) -> None:
    engine.template = template(name)
    async with ModelClient("the user", engine.url, "tiny", None) as user:
        await user.ask([{"role": "system", "content": "s"}, {"role": "system", "content": "be a user"}])
    assert "be a user" in engine.prompts[-1]


async def test_an_engine_that_restarts_with_another_template_is_asked_by_that_one() -> None:
    async with JsonClient(30.0) as client:
        async with fake_engine() as engine:
            engine.template = template("qwen3_coder")
            port = int(engine.url.rpartition(":")[2])
            here = [Endpoint(engine.url, "tiny")]
            assert (await client.post(here, "/v1/chat/completions", {"messages": LATE})).status == 200
        with pytest.raises(endpoints_module.NoReply):
            await client.post(here, "/v1/chat/completions", {"messages": LATE})
        async with fake_engine(port) as engine:
            engine.template = template("strict")
            assert (await client.post(here, "/v1/chat/completions", {"messages": LATE})).status == 200
            assert [each["role"] for each in engine.requests[-1]["messages"]] == ["system", "user", "user"]


async def test_a_server_that_is_no_engine_is_asked_as_it_is() -> None:
    async with troubled() as server:
        server.models = 500
        server.engine.template = None
        here = [Endpoint(server.url, "tiny")]
        async with JsonClient(30.0, with_engines=False) as client:
            assert (await client.post(here, "/v1/chat/completions", {"messages": LATE})).status == 200
        assert server.engine.requests[-1]["messages"] == LATE
        async with JsonClient(30.0) as client:
            with pytest.raises(endpoints_module.NoReply, match="did not say which messages"):
                await client.post(here, "/v1/chat/completions", {"messages": LATE})


DEFAULTS = {
    "qwen2_5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "qwen3": "",
    "llama3_1": "",
    "strict": "",
}


@pytest.mark.parametrize("name", DEFAULTS)
async def test_what_a_template_says_without_a_system_message_is_known(name: str) -> None:
    async with troubled(name) as server, learner(server) as learning:
        model = await learning.learn()
        assert model is not None
        assert model.default_system == DEFAULTS[name]
