"""What a prompt is rendered from, and what a rendering may not be."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import PromptTooLong
from clawloop.core.families.orders import SENT_BY, Rule, as_sent
from clawloop.core.judging.hints import with_hint
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.rendering import EngineRenderer
from tests.fakes.judge import FakeJudge, fake_judge
from tests.records import turn_record

TOOLS = [{"type": "function", "function": {"name": "list_files", "parameters": {}}}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeJudge]:
    async with fake_judge() as running:
        yield running


async def rendered(engine: FakeJudge, turn: TurnRecord) -> list[int]:
    async with EngineRenderer(lambda policy: [Endpoint(engine.url, "tiny")]) as renderer:
        return await renderer.render(turn, turn.messages)


async def test_a_prompt_is_rendered_with_its_turns_tools_and_template_settings(engine: FakeJudge) -> None:
    settings = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True}
    turn = turn_record(tools=TOOLS, sampling={"temperature": 0.6, **settings})
    assert await rendered(engine, turn) == engine.prompt_ids
    assert engine.tokenized == [{"model": "tiny", "messages": turn.messages, "tools": TOOLS, **settings}]


async def test_a_prompt_is_rendered_in_the_order_that_it_was_sent_in(engine: FakeJudge) -> None:
    late = {"role": "system", "content": "late"}
    rules = sorted([Rule.DEVELOPER, Rule.LEADING, Rule.LATE])
    plain = turn_record(sampling={"temperature": 0.6})
    turn = turn_record(messages=[*plain.messages, late], sampling={"temperature": 0.6, SENT_BY: rules})
    await rendered(engine, turn)
    assert engine.tokenized[-1]["messages"] == as_sent(turn.messages, rules)
    assert engine.tokenized[-1]["messages"][-1]["role"] == "user"
    # And with a hint in it, so that both prompts differ by the hint alone.
    hinted = with_hint(turn.messages, "be brief")
    assert hinted is not None
    async with EngineRenderer(lambda policy: [Endpoint(engine.url, "tiny")]) as renderer:
        await renderer.render(turn, hinted)
    assert [each["role"] for each in engine.tokenized[-1]["messages"]] == [
        each["role"] for each in engine.tokenized[-2]["messages"]
    ]


async def test_tools_that_must_not_be_called_are_in_the_prompt_all_the_same(engine: FakeJudge) -> None:
    await rendered(engine, turn_record(tools=TOOLS, sampling={"temperature": 0.6, "tool_choice": "none"}))
    assert engine.tokenized[0]["tools"] == TOOLS


async def test_a_prompt_that_leaves_no_room_for_its_reply_is_too_long(engine: FakeJudge) -> None:
    turn = turn_record(response_ids=[4, 5])
    engine.context_tokens = len(engine.prompt_ids) + 2
    assert await rendered(engine, turn) == engine.prompt_ids
    engine.context_tokens -= 1
    with pytest.raises(PromptTooLong, match="5 tokens with the reply, the context holds 4"):
        await rendered(engine, turn)
