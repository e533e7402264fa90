"""Parsers and thinking of real families, by the text of their chat templates (templates/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawloop.core.errors import SetupError
from clawloop.core.families import chat_format as module
from clawloop.core.families.chat_format import ChatFormat, ChatOptions, chat_format, known_parsers, read_chat_format
from clawloop.core.families.template import Thinking, read_template

TEMPLATES = Path(__file__).parent / "templates"
NEVER, OPTIONAL, ALWAYS = Thinking.NEVER, Thinking.OPTIONAL, Thinking.ALWAYS


def text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "thinking", "tools", "reasoning"),
    [
        ("qwen2_5", NEVER, "hermes", None),
        ("qwen3", OPTIONAL, "hermes", "qwen3"),
        ("qwen3_instruct_2507", NEVER, "hermes", None),
        ("qwen3_coder", NEVER, "qwen3_coder", None),
        ("qwen3_5_think", OPTIONAL, "qwen3_coder", "qwen3"),
        ("llama3_1", NEVER, "llama3_json", None),
        ("llama3_2", NEVER, "llama3_json", None),
        ("mistral_nemo", NEVER, "mistral", None),
        ("ministral_3_reasoning", OPTIONAL, "mistral", "mistral"),
        ("gemma3", NEVER, None, None),
        ("gemma4", OPTIONAL, "gemma4", "gemma4"),
        ("deepseek_r1_distill", ALWAYS, "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3_1", OPTIONAL, "deepseek_v31", "deepseek_v3"),
        ("glm4moe", OPTIONAL, "glm45", "glm45"),
        ("gpt_oss", ALWAYS, "openai", "openai_gptoss"),
        ("minimax_m2", ALWAYS, "minimax_m2", "minimax_m2"),
        ("granite_4", NEVER, "granite4", None),
        ("lfm2_v2", NEVER, "lfm2", None),
        ("smollm2", NEVER, None, None),
        ("strict", ALWAYS, "qwen3_coder", "deepseek_r1"),
    ],
)
def test_a_family_is_known_by_its_template(
    name: str, thinking: Thinking, tools: str | None, reasoning: str | None
) -> None:
    assert chat_format(text(name)) == ChatFormat(thinking, tools, reasoning)


def test_every_kept_template_is_tested() -> None:
    mark = next(m for m in test_a_family_is_known_by_its_template.pytestmark)  # type: ignore[attr-defined]
    tested = {row[0] for row in mark.args[1]} | {"qwen3_5_nothink"}
    assert tested == {path.stem for path in TEMPLATES.glob("*.jinja")}


def test_a_model_that_only_thinks() -> None:
    """Qwen3-…-Thinking-2507: Qwen3's template without the switch, and the thinking opened in every prompt."""
    head, _, _ = text("qwen3").rpartition("    {%- if enable_thinking is defined")
    thinking_only = (
        head.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}") + "{%- endif %}"
    )
    assert "enable_thinking" not in thinking_only
    found = chat_format(thinking_only)
    assert found == ChatFormat(ALWAYS, "hermes", "deepseek_r1")
    assert str(found) == "always thinks first, read by deepseek_r1; tool calls are read by hermes"


def test_where_parser_and_template_guess_differently_the_switch_is_set() -> None:
    # vLLM's qwen3 parser takes a request that says nothing for one that thinks; small Qwen3.5 do not think then.
    found = chat_format(text("qwen3_5_nothink"))
    assert found == ChatFormat(OPTIONAL, "qwen3_coder", "qwen3", switch=("enable_thinking", False))
    *_, name, value = found.engine_arguments
    assert name == "--default-chat-template-kwargs"
    assert json.loads(value)["enable_thinking"] is False
    assert str(found).startswith("thinks where a request switches it on")


def test_a_template_that_cannot_be_rendered_is_judged_by_its_text() -> None:
    assert chat_format("{% if enable_thinking %}<think>{% tokenizer_only %}").thinking is OPTIONAL
    assert chat_format("{{ raise_exception('two messages, please') }}").thinking is NEVER


def test_vllm_has_every_parser_that_is_chosen() -> None:
    tools, reasoning = known_parsers("tool_parsers"), known_parsers("reasoning")
    assert {parser for parser, _ in module._TOOL_CALLS} <= tools
    chosen = {parser for parser, _ in module._REASONING} | module._OFF_BY_DEFAULT
    chosen |= {module._REASONING_DEEPSEEK, module._REASONING_ALWAYS, module._REASONING_OPTIONAL}
    assert chosen <= reasoning


def test_an_operator_sets_template_and_parsers(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(text("gemma3"))
    own = tmp_path / "own.jinja"
    own.write_text(text("qwen3"))
    found = read_chat_format(tmp_path, ChatOptions(own, "pythonic", "none"))
    assert found == ChatFormat(OPTIONAL, "pythonic", None, template=own)
    assert found.engine_arguments == (
        *("--chat-template", str(own)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
    )
    assert read_chat_format(tmp_path) == ChatFormat(NEVER, None, None)


def test_tools_without_a_parser_are_told_from_no_tools(tmp_path: Path) -> None:
    strange = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    found = chat_format(strange)  # its calls have marks that no parser is known for
    assert (found.tool_parser, found.unread_tools) == (None, True)
    assert str(found) == "does not think; no parser reads its tool calls"
    (tmp_path / "chat_template.jinja").write_text(text("qwen2_5"))
    assert read_chat_format(tmp_path, ChatOptions(tool_parser="none")).unread_tools
    assert not read_chat_format(tmp_path).unread_tools
    (tmp_path / "chat_template.jinja").write_text(text("smollm2"))
    assert not read_chat_format(tmp_path, ChatOptions(tool_parser="none")).unread_tools
    assert chat_format("{% if tools %}{% tokenizer_only %}{% endif %}").unread_tools  # it cannot be rendered here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ChatOptions(tool_parser="hermès"), "--tool-call-parser: vLLM has no parser 'hermès': give none or one of "),
        (ChatOptions(reasoning_parser="x"), "--reasoning-parser: vLLM has no parser 'x': give none or one of "),
        (ChatOptions(Path("/nowhere.jinja")), "the chat template /nowhere.jinja cannot be read"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path, options: ChatOptions, message: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text("qwen3"))
    with pytest.raises(SetupError) as raised:
        read_chat_format(tmp_path, options)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("kept", ["chat_template.json", "tokenizer_config.json"])
def test_a_template_is_found_in_every_file_that_holds_one(tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).write_text(json.dumps({"chat_template": "one"}))
    assert read_template(tmp_path) == "one"
    named = [{"name": "rag", "template": "other"}, {"name": "default", "template": "two"}]
    (tmp_path / kept).write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "two"


def test_without_a_template_the_error_names_both_remedies(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SetupError, match=r"has no chat template.*instruction-tuned.*--chat-template FILE"):
        read_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("not JSON")
    with pytest.raises(SetupError, match=r"cannot be read.*download the model again"):
        read_template(tmp_path)


def test_a_template_whose_replies_are_marked_for_training_is_read_like_the_plain_one() -> None:
    """As trainers save it with a model that they tuned."""
    plain = text("deepseek_r1_distill")
    assert chat_format(f"{{% generation %}}{plain}{{% endgeneration %}}") == chat_format(plain)


def test_what_is_no_template_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n{% for message in %}")
    with pytest.raises(SetupError, match=r"chat_template\.jinja has an error in line 2, .*--chat-template FILE"):
        read_chat_format(tmp_path)
