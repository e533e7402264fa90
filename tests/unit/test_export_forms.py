"""Each form of an export is read by what it is for: chat templates as TRL renders them, OpenAI's types, and us."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import ApiKeyId, SessionId
from clawloop.core.turns.canonical import prefix_digests, seed_digest
from clawloop.operations.export import (
    ExportedJudgement,
    ExportedTurn,
    Exporter,
    ExportFilter,
    ExportKind,
    Record,
)
from tests.records import turn_record

TEMPLATES = Path(__file__).parent / "families" / "templates"
WITHOUT_CALLS = ("gemma3.jinja", "smollm2.jinja")
# R1's distilled models are rendered from OpenAI's form.
WITH_CALLS = sorted({path.name for path in TEMPLATES.glob("*.jinja")} - {*WITHOUT_CALLS, "deepseek_r1_distill.jinja"})
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "t",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def call(arguments: str, call_id: str = "chatcmpl-tool-89c1737ea38ada26") -> Message:
    function: dict[str, Any] = {"name": "get_time", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


ASKED: list[Message] = [
    {"role": "user", "content": [{"type": "text", "text": "What time is it"}, {"type": "text", "text": "in Oslo?"}]}
]
TOLD: list[Message] = [{"role": "tool", "tool_call_id": "chatcmpl-tool-89c1737ea38ada26", "content": "noon"}]
RIGHT = call('{"city": "Oslo"}')
ANSWER: Message = {"role": "assistant", "content": "Noon.", "reasoning_content": None}


class Store:
    """Satisfies `ExportStore`: one page of turns."""

    def __init__(self, turns: Sequence[ExportedTurn]) -> None:
        self._turns = list(turns)

    async def turns(self, wanted: ExportFilter, after: UUID | None, limit: int, *, judged: bool) -> Any:
        return (self._turns, self._turns[-1].record.turn_id) if after is None else ([], None)


def exported(kind: ExportKind, *turns: tuple[list[Message], Message], verdict: int = 1) -> list[Record]:
    """The rows of these requests and their replies."""
    judgement = ExportedJudgement(verdict, float(verdict), [], None, [])
    made = [
        ExportedTurn(
            record=turn_record(messages=messages, response=reply, tools=TOOLS),
            session=SessionId(UUID(int=2)),
            external=None,
            number=1,
            outcome="trained",
            next_state=[],
            judgement=judgement,
        )
        for messages, reply in turns
    ]

    async def read() -> list[Record]:
        pages = Exporter(Store(made)).pages(kind, ExportFilter(), None)  # type: ignore[arg-type]
        return [json.loads(json.dumps(record)) async for page in pages for record in page]

    return asyncio.run(read())


def rendered(row: Any, template: str) -> str:
    """What TRL's trainers make of a row's messages and tools."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), bos_token="<s>", eos_token="</s>"
    )
    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    text = tokenizer.apply_chat_template(
        messages, tools=row["tools"], chat_template=(TEMPLATES / template).read_text(), tokenize=False
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", WITH_CALLS)
@pytest.mark.parametrize("kind", [ExportKind.CHAT, ExportKind.PREFERENCE])
def test_templates_render_calls_and_their_results(kind: ExportKind, template: str) -> None:
    called, told = exported(kind, (ASKED, RIGHT), ([*ASKED, RIGHT, *TOLD], ANSWER))
    for row in (called, told):
        text = rendered(row, template)
        assert "What time is it\nin Oslo?" in text
        assert text.count("Oslo") >= 2  # in the question, and as an argument
        assert '\\"' not in text.replace('\\"type', "")  # no arguments in quotes
        assert "None" not in text
    assert "Noon." in rendered(told, template)


@pytest.mark.parametrize("template", WITHOUT_CALLS)
@pytest.mark.parametrize("kind", [ExportKind.CHAT, ExportKind.PREFERENCE])
def test_templates_without_calls_render_what_was_said(kind: ExportKind, template: str) -> None:
    called, _ = exported(kind, (ASKED, RIGHT), ([*ASKED, RIGHT, *TOLD], ANSWER))
    text = rendered(called, template)
    assert "What time is it\nin Oslo?" in text
    assert text.count("Oslo") == 1  # no argument
    assert "None" not in text


def test_a_template_that_wants_strings_renders_openais_form() -> None:
    (row,) = exported(ExportKind.OPENAI, ([{"role": "user", "content": "What time is it?"}], RIGHT))
    assert '{"city": "Oslo"}' in rendered(row, "deepseek_r1_distill.jinja")


def test_openais_types_take_its_form() -> None:
    thinking = {**ANSWER, "reasoning_content": "Noon is twelve."}
    rows: list[Any] = exported(ExportKind.OPENAI, (ASKED, RIGHT), ([*ASKED, RIGHT, *TOLD], thinking))
    for row in rows:
        for message in row["messages"]:
            read: Any = TypeAdapter(ChatCompletionMessageParam).validate_python(message)
            assert [*(read.get("tool_calls") or [])] == message.get("tool_calls", [])
            assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id", "name"}
        assert TypeAdapter(list[ChatCompletionToolParam]).validate_python(row["tools"]) == TOOLS
    assert rows[0]["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


@pytest.mark.parametrize("arguments", ['{"city": ', '"Oslo"', '["Oslo"]', '"{\\"city\\": 1}"'])
def test_calls_that_templates_cannot_read_are_left_out(arguments: str) -> None:
    wrong, right = (ASKED, call(arguments)), (ASKED, RIGHT)
    for kind in (ExportKind.CHAT, ExportKind.PREFERENCE):
        assert len(exported(kind, wrong, right)) == 1
    assert len(exported(ExportKind.OPENAI, wrong, right)) == 2


def test_calls_without_arguments_and_who_develops() -> None:
    (row,) = exported(ExportKind.CHAT, ([{"role": "developer", "content": "Be brief."}, *ASKED], call("")))
    messages: Any = row["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[-1]["tool_calls"][0]["function"]["arguments"] == {}


def test_results_still_name_their_call_and_we_read_the_same_conversation() -> None:
    request = [*ASKED, call('{"city":  "Oslo"}', "a1b2c3d4e"), {**TOLD[0], "tool_call_id": "a1b2c3d4e"}]
    (row,) = exported(ExportKind.CHAT, (request, ANSWER))
    messages: Any = row["messages"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "a1b2c3d4e"
    (long,) = exported(ExportKind.CHAT, ([*ASKED, RIGHT, *TOLD], ANSWER))
    long_messages: Any = long["messages"]
    assert long_messages[1]["tool_calls"][0]["id"] == long_messages[2]["tool_call_id"]
    assert len(long_messages[1]["tool_calls"][0]["id"]) == 9
    # As the history of a further request, each form is the conversation that was recorded.
    seed = seed_digest(ApiKeyId(UUID(int=1)), ())
    joined: list[Message] = [{"role": "user", "content": "What time is it\nin Oslo?"}, *request[1:]]
    assert prefix_digests(seed, messages[:-1]) == prefix_digests(seed, joined)
    (same,) = exported(ExportKind.OPENAI, (request, ANSWER))
    openais: Any = same["messages"]
    assert prefix_digests(seed, openais[:-1]) == prefix_digests(seed, request)
