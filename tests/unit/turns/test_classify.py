"""Main or side: the client's word, the model alias, known side prompts, else main; and always a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from pydantic import JsonValue

from clawloop.contracts.turns import Message, TurnKind
from clawloop.turns.classify import classify, is_side_prompt
from tests.chats import VOLATILE, assistant, calls, json_values, system, tool, user
from tests.openclaw_chats import (
    AFTER_HEARTBEATS,
    COMPACTED,
    COMPACTION,
    COMPACTION_REQUEST,
    FIRST,
    FLUSH_REQUEST,
    HEARTBEAT,
    HEARTBEAT_REQUEST,
    MEMORY_FLUSH,
    OLD_HEARTBEAT,
    POLL,
    RECAP_REQUEST,
    SECOND,
    TITLE,
    TOOLS,
)

MAIN, SIDE = TurnKind.MAIN, TurnKind.SIDE


@pytest.mark.parametrize(
    ("headers", "body", "side_alias", "kind", "reason"),
    [
        ({"x-turn-type": "side"}, {"turn_type": "main"}, False, SIDE, "header X-Turn-Type: side"),
        ({"x-turn-type": " Main "}, {}, True, MAIN, "header X-Turn-Type: main"),
        ({}, {"turn_type": "side"}, False, SIDE, "body turn_type: side"),
        ({}, {"turn_type": "main"}, True, MAIN, "body turn_type: main"),
        ({}, {}, True, SIDE, "model name for side turns"),
        ({}, {}, False, MAIN, "no sign of a side turn"),
        ({"x-turn-type": ""}, {"turn_type": None}, False, MAIN, "no sign of a side turn"),
        ({}, {"turn_type": 5}, False, MAIN, "no sign of a side turn"),
        (
            {"x-turn-type": "heartbeat"},
            {"turn_type": "side"},
            False,
            SIDE,
            "body turn_type: side (header X-Turn-Type 'heartbeat' is neither main nor side)",
        ),
        (
            {},
            {"turn_type": "x\0" + "y" * 100},
            True,
            SIDE,
            "model name for side turns (body turn_type 'x\\x00" + "y" * 38 + "' is neither main nor side)",
        ),
    ],
)
def test_the_first_rule_that_applies_decides_and_is_the_reason(
    headers: dict[str, str], body: dict[str, JsonValue], side_alias: bool, kind: TurnKind, reason: str
) -> None:
    decision = classify(headers, body, side_alias=side_alias)
    assert (decision.kind, decision.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("messages", "tools", "name"),
    [
        (HEARTBEAT_REQUEST, TOOLS, "heartbeat"),
        ([*SECOND[:-1], assistant("Reply #2"), user(OLD_HEARTBEAT)], TOOLS, "heartbeat"),
        ([*HEARTBEAT_REQUEST[:2], calls("exec"), tool("exec", "x"), VOLATILE], TOOLS, "heartbeat"),
        (FLUSH_REQUEST, TOOLS, "memory flush"),
        (COMPACTION_REQUEST, None, "compaction"),
        (COMPACTION_REQUEST, [], "compaction"),
        (RECAP_REQUEST, None, "recap"),
        ([system(TITLE), user("hello")], None, "title"),
        (
            [system("You are a title generator. You output ONLY a thread title. Nothing else."), user("x")],
            None,
            "title",
        ),
        (
            [user("### Task:\nGenerate a concise, 3-5 word title.\n<chat_history>\nUSER: x\n</chat_history>")],
            None,
            "title",
        ),
    ],
)
def test_known_side_prompts_are_side(messages: list[Message], tools: JsonValue, name: str) -> None:
    decision = classify({}, {"messages": list(messages), "tools": tools}, side_alias=False)
    assert (decision.kind, decision.reason) == (SIDE, f"known side prompt: {name}")


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (FIRST, TOOLS),
        (SECOND, TOOLS),
        (COMPACTED, TOOLS),
        (AFTER_HEARTBEATS, TOOLS),
        ([user(f"What does this mean: {HEARTBEAT}")], None),
        ([user(f"> {MEMORY_FLUSH}")], None),
        ([user("Pre-compaction memory flush. What is that?")], None),
        ([user("Read HEARTBEAT.md if it exists and tell me what is in it")], TOOLS),
        ([user("Follow the heartbeat monitor scratch context when provided. Why?")], TOOLS),
        ([user(f"Summarise: {COMPACTION}")], None),
        ([user(COMPACTION)], None),
        ([user("Write an Activity recap for someone scanning their tasks")], None),
        ([user("Generate a concise, 3-5 word title for my essay")], None),
        ([system(COMPACTION), user("hello")], TOOLS),  # an agent that opens like this, with tools
        ([system("You are a context summarization assistant. Chat with people."), user("hello")], None),
        ([user("hello"), system(COMPACTION)], None),
        ([user(HEARTBEAT), assistant("NO_REPLY"), user("hello")], TOOLS),
        ([], None),
    ],
)
def test_ordinary_requests_are_main_whatever_they_quote(messages: list[Message], tools: JsonValue) -> None:
    decision = classify({}, {"messages": list(messages), "tools": tools}, side_alias=False)
    assert (decision.kind, decision.reason) == (MAIN, "no sign of a side turn")


def test_a_side_prompt_is_known_in_the_history_too() -> None:
    assert is_side_prompt(user(f"[Fri 2026-11-20 11:19 UTC] {POLL}"))
    assert is_side_prompt(AFTER_HEARTBEATS[1])
    assert not is_side_prompt(AFTER_HEARTBEATS[2])
    assert not is_side_prompt(assistant(POLL))


@given(json_values, json_values, json_values)
def test_no_body_raises(turn_type: JsonValue, messages: JsonValue, content: JsonValue) -> None:
    classify({}, {"turn_type": turn_type, "messages": messages}, side_alias=False)
    classify({}, {"messages": [messages, {"role": "user", "content": content}]}, side_alias=False)
