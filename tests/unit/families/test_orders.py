"""Orders of roles that real families' templates refuse or lose, rendered as transformers renders them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from clawloop.core.families.orders import Probe, Rendered, Rule, as_sent, probing

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "b"}},
            "required": ["a"],
        },
    },
}
ARGUMENTS = '{"a": "Tools"}'
LENIENT: frozenset[Rule] = frozenset()
LATE_SYSTEM = frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE, Rule.NO_USER})
MISTRAL = frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE, Rule.USERS, Rule.REPLIES, Rule.AFTER_TOOL})
RULES = {
    "deepseek_r1_distill": frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE, Rule.TOOLS}),
    "deepseek_v3_1": frozenset({Rule.DEVELOPER, Rule.LATE}),
    "gemma3": frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.TOOLS, Rule.LATE, Rule.NO_USER, Rule.USERS, Rule.REPLIES}),
    "gemma4": LENIENT,
    "glm4moe": frozenset({Rule.DEVELOPER}),
    "gpt_oss": frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE}),
    "granite_4": frozenset({Rule.DEVELOPER}),
    "lfm2_v2": LENIENT,
    "llama3_1": LENIENT,
    "llama3_2": LENIENT,
    "minimax_m2": frozenset({Rule.DEVELOPER, Rule.LEADING, Rule.LATE}),
    "ministral_3_reasoning": MISTRAL,
    "mistral_nemo": MISTRAL | {Rule.NO_USER},
    "qwen2_5": frozenset({Rule.DEVELOPER}),
    "qwen3": frozenset({Rule.DEVELOPER}),
    "qwen3_5_nothink": LATE_SYSTEM,
    "qwen3_5_think": LATE_SYSTEM,
    "qwen3_coder": LENIENT,
    "qwen3_instruct_2507": frozenset({Rule.DEVELOPER}),
    "smollm2": frozenset({Rule.TOOLS}),
    "strict": LATE_SYSTEM,
}


def text_of(messages: Any, tools: Any, template: str) -> str | None:
    """As vLLM has a template render: arguments as an object, no content as none; None if it refuses."""
    read = copy.deepcopy(list(messages))
    for message in read:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    try:
        (rendered,), _ = render_jinja_template(
            [read], tools=tools, chat_template=template, add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    assert isinstance(rendered, str)
    return rendered


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def renders(name: str) -> Callable[[Probe], str | None]:
    return lambda probe: text_of(probe.messages, probe.tools, template(name))


def message(role: str, text: str | None) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(number: int = 1) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": ARGUMENTS}
    return message("assistant", None) | {
        "tool_calls": [{"id": f"call1234{number}", "type": "function", "function": function}]
    }


def result(text: str, number: int = 1) -> dict[str, Any]:
    return message("tool", text) | {"tool_call_id": f"call1234{number}"}


def rules_of(rendered: Callable[[Probe], Rendered]) -> frozenset[Rule]:
    """The rules of a template that is rendered here."""
    asking = probing()
    try:
        probe = next(asking)
        while True:
            probe = asking.send(rendered(probe))
    except StopIteration as end:
        found: frozenset[Rule] = end.value
        return found


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_of_each_family(name: str) -> None:
    assert rules_of(renders(name)) == RULES[name]


STEPS = st.lists(
    st.sampled_from(("system", "developer", "user", "assistant", "loop", "loop with a system message")), max_size=6
)


def conversation(steps: list[str], opening: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages with a text each, in the orders that clients send, and the texts."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def said() -> str:
        texts.append(f"text-{len(texts)}-end")
        return texts[-1]

    for role in [*opening, "user", *steps, "user"]:
        if role.startswith("loop"):
            messages += [call(), result(said())]
            messages += [message("system", said())] if role != "loop" else []
            messages.append(message("assistant", said()))
        else:
            messages.append(message(role, said()))
    return messages, texts


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS, opening=st.lists(st.sampled_from(("system", "developer")), max_size=3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_no_text_is_lost_and_none_moves(name: str, steps: list[str], opening: list[str]) -> None:
    messages, texts = conversation(steps, opening)
    before = [dict(each) for each in messages]
    sent = list(as_sent(messages, RULES[name]))
    tools = None if Rule.TOOLS in RULES[name] else [TOOL]
    rendered = text_of(sent, tools, template(name))
    assert rendered is not None
    if name != "mistral_nemo":  # puts the system prompt before the last user text, and loses text beside a call
        places = [rendered.find(text) for text in texts]
        assert -1 not in places
        assert places == sorted(places)
    assert [dict(each) for each in messages] == before


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS, opening=st.lists(st.sampled_from(("system", "developer")), max_size=3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_what_was_sent_stays_as_the_conversation_grows(name: str, steps: list[str], opening: list[str]) -> None:
    messages, _ = conversation(steps, opening)
    rules = RULES[name]
    whole = list(as_sent(messages, rules))
    for length in range(len(opening) + 1, len(messages)):
        part = list(as_sent(messages[:length], rules))
        # The last message may go on; what is before it does not change.
        assert whole[: len(part) - 1] == part[:-1]
        assert whole[len(part) - 1]["role"] == part[-1]["role"]
        assert str(whole[len(part) - 1]["content"]).startswith(str(part[-1]["content"]))


def test_parts_keep_their_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages = [
        message("system", "a") | {"content": [{"type": "text", "text": "a"}]},
        message("system", "b"),
        message("user", "c") | {"content": [{"type": "text", "text": "c"}, image]},
        message("system", "d") | {"content": [{"type": "text", "text": "d"}]},
    ]
    sent = as_sent(messages, frozenset({Rule.LEADING, Rule.LATE, Rule.USERS}))
    assert [each["role"] for each in sent] == ["system", "user"]
    texts = ["".join(part.get("text", "<image>") for part in each["content"]) for each in sent]
    assert texts == ["a\n\nb", "c<image>\n\n<system>\nd\n</system>"]


def test_what_a_template_takes_is_sent_as_it_came() -> None:
    messages = [message("system", "a"), message("user", "b"), message("assistant", "c"), message("user", "d")]
    assert as_sent(messages, LATE_SYSTEM) is messages
    assert as_sent([*messages, message("system", "e")], LENIENT)[-1] == message("system", "e")


def test_a_template_that_tells_no_texts_apart_has_no_rules() -> None:
    assert rules_of(lambda probe: [len(each["content"]) and 1 for each in probe.messages]) == frozenset()
    assert rules_of(lambda probe: None) == frozenset()


def test_a_system_message_that_no_template_takes_is_user_text() -> None:
    def refuses_system(probe: Probe) -> str | None:
        roles = [each["role"] for each in probe.messages]
        return None if "system" in roles or "developer" in roles else str(probe.messages) + str(probe.tools)

    rules = rules_of(refuses_system)
    assert rules == frozenset({Rule.DEVELOPER, Rule.SYSTEM})
    assert as_sent([message("system", "s"), message("user", "u")], rules) == [
        message("user", "<system>\ns\n</system>"),
        message("user", "u"),
    ]


def test_a_template_is_asked_a_few_dozen_times() -> None:
    asking, count = probing(), 1
    probe = next(asking)
    try:
        while True:
            probe = asking.send(text_of(probe.messages, probe.tools, template("qwen3")))
            count += 1
    except StopIteration:
        assert count < 50
