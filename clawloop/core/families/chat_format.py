"""vLLM's options for chats of a model family: template, parsers of tool calls and of thinking.

They are found by the text that the chat template writes, not by a model's name: derived models keep the template of
their family. Names of parsers are those of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from clawloop.core.errors import SetupError
from clawloop.core.families.orders import shows_tools
from clawloop.core.families.template import SWITCHES, Thinking, read_template, render, switched, thinking_of

NO_PARSER = "none"

_Rule: TypeAlias = tuple[str, tuple[str, ...]]
# A parser, and the marks that a template has all of; the first that fits counts, so the more particular ones lead.
_TOOL_CALLS: tuple[_Rule, ...] = (
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("openai", ("<|channel|>", "commentary")),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|tool|>")),
    ("granite4", ("<|start_of_role|>", "<tool_call>")),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("olmo3", ("<function_calls>", "<functions>")),
    ("internlm", ("<|action_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|eom_id|>", "ipython")),
    ("llama3_json", ("<|eot_id|>", "ipython")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
)
# Likewise of models that think; what else writes `<think>` is decided by when it thinks.
_REASONING: tuple[_Rule, ...] = (
    ("gemma4", ("<|channel>",)),
    ("openai_gptoss", ("<|channel|>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("granite", ("<|start_of_role|>",)),
    ("glm45", ("<arg_key>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v4", ("｜DSML｜", "tool_calls")),
)
_REASONING_DEEPSEEK = "deepseek_v3"  # `<｜Assistant｜>` with a switch
_REASONING_ALWAYS = "deepseek_r1"  # all text up to `</think>` is thinking, whatever a request switches
_REASONING_OPTIONAL = "qwen3"
# Parsers that assume thinking is off if a request does not set it; all other parsers assume that it is on.
_OFF_BY_DEFAULT = frozenset({"gemma4", "deepseek_v3", "deepseek_v4", "granite"})


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """An operator's settings; None: the value found by the chat template.

    Args:
        template: a file.
        tool_parser, reasoning_parser: names of vLLM's parsers, or `none`.
    """

    template: Path | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Format of a model's chats.

    Args:
        thinking: whether the model thinks before it answers.
        tool_parser: None if the template has no tools, or none is known that reads its calls.
        reasoning_parser: None if the model never thinks: a parser would take the reply for thinking.
        switch: the template's switch of thinking, and its value for requests that do not set it, needed where the
            parser's default differs from the template's; None if both agree.
        template: the operator's own file; None: the model's template.
        unread_tools: the template has tools, and no parser is set: gateways send tools on, and vLLM refuses them.
    """

    thinking: Thinking
    tool_parser: str | None
    reasoning_parser: str | None
    switch: tuple[str, bool] | None = None
    template: Path | None = None
    unread_tools: bool = False

    @property
    def engine_arguments(self) -> tuple[str, ...]:
        """Arguments of vLLM's `api_server`."""
        arguments: list[str] = []
        if self.template is not None:
            arguments += ["--chat-template", str(self.template)]
        if self.tool_parser is not None:
            arguments += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        if self.reasoning_parser is not None:
            arguments += ["--reasoning-parser", self.reasoning_parser]
        if self.switch is not None:
            arguments += ["--default-chat-template-kwargs", json.dumps(dict([self.switch]))]
        return tuple(arguments)

    def __str__(self) -> str:
        thinks = {
            Thinking.NEVER: "does not think",
            Thinking.OPTIONAL: "thinks unless a request switches it off",
            Thinking.ALWAYS: "always thinks first",
        }[self.thinking]
        if self.thinking is Thinking.OPTIONAL and self._is_off_by_default:
            thinks = "thinks where a request switches it on"
        read = f", read by {self.reasoning_parser}" if self.reasoning_parser else ""
        without = "no parser reads its tool calls" if self.unread_tools else "its template knows no tools"
        return f"{thinks}{read}; {f'tool calls are read by {self.tool_parser}' if self.tool_parser else without}"

    @property
    def _is_off_by_default(self) -> bool:
        return self.reasoning_parser in _OFF_BY_DEFAULT if self.switch is None else not self.switch[1]


def read_chat_format(folder: Path, options: ChatOptions | None = None) -> ChatFormat:
    """Chat format of a folder's model.

    Raises:
        SetupError: the model has no chat template, or vLLM has no parser of the name that was set.
    """
    options = options or ChatOptions()
    text = read_template(folder, options.template)
    found = chat_format(text)
    tool_parser = _chosen("--tool-call-parser", "tool_parsers", options.tool_parser, found.tool_parser)
    reasoning = _chosen("--reasoning-parser", "reasoning", options.reasoning_parser, found.reasoning_parser)
    template = None if options.template is None else options.template.absolute()
    return ChatFormat(
        found.thinking, tool_parser, reasoning, found.switch, template, tool_parser is None and _knows_tools(text)
    )


def chat_format(template: str) -> ChatFormat:
    """Chat format of models with this chat template."""
    on, off, unsaid = (render(template, switches) for switches in (switched(True), switched(False), {}))
    if on is None or off is None:
        thinking = Thinking.OPTIONAL if "enable_thinking" in template else Thinking.NEVER
    else:
        thinking = thinking_of(on, off)
    reasoning = _reasoning(template, thinking)
    switch: tuple[str, bool] | None = None
    if thinking is Thinking.OPTIONAL and on != off and unsaid in (on, off) and unsaid is not None:
        is_on = unsaid == on
        if is_on == (reasoning in _OFF_BY_DEFAULT):
            switch = next(name for name in SWITCHES if name in template), is_on
    tool_parser = _first(_TOOL_CALLS, template)
    return ChatFormat(
        thinking, tool_parser, reasoning, switch, unread_tools=tool_parser is None and _knows_tools(template)
    )


def known_parsers(kind: str) -> frozenset[str]:
    """The parsers of the installed vLLM, read without importing it; empty if it is not installed.

    Args:
        kind: `tool_parsers` or `reasoning`, its packages.
    """
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return frozenset()
    registry = Path(vllm.submodule_search_locations[0]) / kind / "__init__.py"
    return frozenset(re.findall(r'^    "([\w-]+)": \(', registry.read_text(encoding="utf-8"), re.MULTILINE))


def _chosen(option: str, kind: str, given: str | None, found: str | None) -> str | None:
    if given is None:
        return found
    known = known_parsers(kind)
    if given != NO_PARSER and known and given not in known:
        raise SetupError(
            f"{option}: vLLM has no parser {given!r}: give {NO_PARSER} or one of {', '.join(sorted(known))}"
        )
    return None if given == NO_PARSER else given


def _reasoning(template: str, thinking: Thinking) -> str | None:
    if thinking is Thinking.NEVER:
        return None
    particular = _first(_REASONING, template)
    if particular is not None or "think>" not in template:
        return particular  # None: its thinking has other marks, which no parser of vLLM reads
    if thinking is Thinking.ALWAYS:
        return _REASONING_ALWAYS
    return _REASONING_DEEPSEEK if "<｜Assistant｜>" in template else _REASONING_OPTIONAL


def _knows_tools(template: str) -> bool:
    """True if gateways, which ask the engine in the same way, will send it tools."""
    if render(template, {}) is None:
        return "tools" in template
    asking = shows_tools()
    probe = next(asking)
    try:
        while True:
            probe = asking.send(render(template, {}, probe.messages, probe.tools))
    except StopIteration as answer:
        return bool(answer.value)


def _first(rules: tuple[_Rule, ...], template: str) -> str | None:
    return next((parser for parser, marks in rules if all(mark in template for mark in marks)), None)
