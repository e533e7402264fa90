"""A recorded request is answered again by an engine that is idle, over HTTP with a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from api.chat.practice import PracticeClient
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.serving import Directory, Engine, Policy
from clawloop.core.contracts.turns import TurnKind, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable, EngineRejected, EngineUnavailable
from clawloop.core.ids import new_lesson_id, new_turn_id
from clawloop.core.lessons.practice import MOST_TOKENS, Practice, request_again
from clawloop.core.lessons.prompt import DEFAULT_SYSTEM
from clawloop.core.recipes.recipe import Recipe
from clawloop.serving import endpoints
from tests.fakes.engine import PROMPT_IDS, FakeEngine
from tests.records import turn_record

TOOL = {"type": "function", "function": {"name": "exec"}}
SAMPLING = {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "chat_template_kwargs": {"enable_thinking": False}}
LESSONS = (ShownLesson(new_lesson_id(), "Be brief."),)


@asynccontextmanager
async def practising(*engines: Engine) -> AsyncIterator[PracticeClient]:
    directory = Directory((Policy("default", "tiny", (), 1, {}),), engines)
    async with PracticeClient(lambda: directory, lambda: "secret", seconds=30) as client:
        yield client


def serving_version(engine: FakeEngine, *versions: int) -> Engine:
    return Engine(engine.url.removeprefix("http://"), engine.url, {"default": frozenset(versions)}, draining=False)


def practice(said: str = "hi", version: int = 1, **changes: Any) -> Practice:
    own = {"sampling": SAMPLING, "lessons": LESSONS} | changes
    return Practice(turn_record(said, **own), LESSONS, version, Recipe(name="any"))


async def test_a_request_is_sent_as_it_was_without_lessons_and_after_chats(engine: FakeEngine) -> None:
    asked = practice(
        tools=[TOOL], group_id=new_turn_id(), sampling=SAMPLING | {"n": 2, "asked": {}, "max_tokens": 9000}
    )
    async with practising(serving_version(engine, 1)) as client:
        reply = await client.answer(asked)
    (sent,) = [body for body in engine.requests if body.get("priority")]
    assert sent.pop("priority") > time.time() + 600
    assert sent == {
        "model": "default-v1",
        "messages": asked.source.messages,
        "tools": [TOOL],
        **SAMPLING,
        "max_tokens": MOST_TOKENS,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    assert engine.authorizations == ["Bearer secret"]
    assert reply is not None
    record = reply.record
    assert (record.kind, record.status, record.version) == (TurnKind.PRACTICE, TurnStatus.COMPLETE, 1)
    assert record.turn_id != asked.source.turn_id
    assert (record.prompt_ids, record.response_ids) == (PROMPT_IDS, [10, 11, 12, 13, 14, 2])
    assert record.logprobs == [-0.1, -0.11, -0.12, -0.13, -0.14, -0.02]
    assert record.sampling == SAMPLING | {"max_tokens": MOST_TOKENS}
    assert (record.messages, record.lessons, record.group_id) == (asked.source.messages, (), None)
    assert record.response is not None
    assert record.response["content"] == "Hello there, friend."


async def test_a_reply_that_measures_a_lesson_is_given_with_it(engine: FakeEngine) -> None:
    asked = replace(practice(), measured=LESSONS[0].id)
    async with practising(serving_version(engine, 1)) as client:
        reply = await client.answer(asked)
    (sent,) = [body for body in engine.requests if body.get("priority")]
    assert "- Be brief." in sent["messages"][0]["content"]
    assert reply is not None
    assert (reply.record.lessons, reply.record.messages) == (LESSONS, asked.source.messages)
    assert reply.record.kind_reason == f"yardstick of the request of {asked.source.turn_id}"


@pytest.mark.parametrize(("busy", "versions"), [("1.0", [1]), ("2.5e+01", [1]), (None, [1]), ("0.0", [2])])
async def test_only_an_idle_engine_with_the_version_is_asked(
    engine: FakeEngine, busy: str | None, versions: Sequence[int]
) -> None:
    engine.busy = busy
    async with practising(serving_version(engine, *versions)) as client:
        assert await client.answer(practice()) is None
        engine.busy = "0"
        assert (await client.answer(practice(version=0))) is not None


async def test_an_engine_that_does_not_say_at_once_whether_it_is_idle_is_busy(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_BUSY_SECONDS", 0.1)
    engine.hold = asyncio.Event()
    async with practising(serving_version(engine, 1)) as client, asyncio.timeout(15):  # an answer may take 30
        assert await client.answer(practice()) is None


async def test_an_engine_that_is_away_is_not_idle(engine: FakeEngine) -> None:
    away = Engine("away", "http://127.0.0.1:9", {"default": frozenset({1})}, draining=False)
    drained = Engine("drained", engine.url, {"default": frozenset({1})}, draining=True)
    async with practising(away, drained) as client:
        assert await client.answer(practice()) is None
    async with practising(away, serving_version(engine, 1)) as client:
        reply = await client.answer(practice())
    assert reply is not None
    assert reply.record.engine_id == engine.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("said", "error"),
    [("OVERFLOW", EngineRejected), ("FAIL500", EngineUnavailable), ("GARBAGE", EngineAnswerUnusable)],
)
async def test_an_engine_that_does_not_answer_says_whether_to_ask_again(
    engine: FakeEngine, said: str, error: type[Exception]
) -> None:
    async with practising(serving_version(engine, 1)) as client:
        with pytest.raises(error):
            await client.answer(practice(said))


async def test_what_is_no_chat_completion_is_told(engine: FakeEngine) -> None:
    engine.verbatim = b'{"choices": [{"text": "no chat"}]}'
    async with practising(serving_version(engine, 1)) as client:
        with pytest.raises(EngineAnswerUnusable):
            await client.answer(practice())


async def test_without_a_system_message_the_templates_own_text_is_known(engine: FakeEngine) -> None:
    engine.template = (
        "{% if messages[0].role != 'system' %}You are a clock.\n{% endif %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    )
    system = {"role": "system", "content": "You are a bell."}
    async with practising(serving_version(engine, 1)) as client:
        plain = await client.answer(practice())
        told = await client.answer(practice(messages=[system, {"role": "user", "content": "hi"}]))
    assert plain is not None
    assert told is not None
    assert told.default_system == ""
    assert DEFAULT_SYSTEM not in plain.record.sampling
    assert "You are a clock." in engine.prompts[0]


def test_a_request_has_a_limit_and_nothing_that_was_only_recorded() -> None:
    recorded = {DEFAULT_SYSTEM: "You are a clock.", "tool_origins": {}, "instructions_length": 3, "n": 2}
    plain = turn_record(sampling={"temperature": 0.6} | recorded, lessons=LESSONS)
    assert request_again(plain) == {
        "messages": plain.messages,
        "temperature": 0.6,
        "max_completion_tokens": MOST_TOKENS,
    }
    short = turn_record(sampling={"temperature": 0.6, "max_tokens": 7})
    assert request_again(short)["max_tokens"] == 7
    for name in ("max_completion_tokens", "max_tokens"):  # clients send null for no limit
        unlimited = turn_record(sampling={"temperature": 0.6, name: None})
        assert request_again(unlimited)["max_completion_tokens"] == MOST_TOKENS
