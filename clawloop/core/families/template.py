"""A model folder's chat template: its text, what it renders, and whether the model thinks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clawloop.core.errors import SetupError

# Templates ------------------------------------------------------------------------------------------------------------
# A model folder's chat template: its text, and what it renders.

# Files in which a folder may keep its template, the first that has one counts: the order of `transformers`.
_JSON_FILES = ("chat_template.json", "tokenizer_config.json")
_CHAT = [{"role": "user", "content": "Hello"}]
_REPLY = "Good day to you."


class _Generation(Extension):
    """`{% generation %}` of transformers, with which trainers mark replies: what it encloses is written as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it for instances

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(folder: Path, given: Path | None = None) -> str:
    """The text of a model's chat template.

    Args:
        given: the operator's own, instead of the model's.

    Raises:
        SetupError: there is none, or it cannot be read, or is no template.
    """
    path, text = _found(folder, given)
    try:
        _environment().parse(text)
    except TemplateSyntaxError as error:
        raise SetupError(
            f"the chat template {path} has an error in line {error.lineno}, {error.message}: give another template:"
            " --chat-template FILE"
        ) from error
    return text


def _found(folder: Path, given: Path | None) -> tuple[Path, str]:
    if given is not None:
        return given, _read(given)
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path, _read(path)
    for path in (folder / name for name in _JSON_FILES):
        if path.is_file() and (found := _in_json(path)):
            return path, found
    raise SetupError(
        f"{folder} has no chat template, so it cannot chat: choose the instruction-tuned model of its family, or give a"
        " template: --chat-template FILE"
    )


def render(
    template: str,
    switches: Mapping[str, bool],
    messages: Sequence[Mapping[str, Any]] = _CHAT,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str | None:
    """A chat, by default a short one, with the prompt for a reply; None if the template cannot render it here.

    Args:
        switches: further variables of the template.
    """
    return _rendered(template, messages=messages, tools=tools, add_generation_prompt=True, eos_token="", **switches)


def behind_reply(template: str, eos_token: str) -> str | None:
    """What the template writes behind a reply that ends a chat; None if it cannot render one here.

    Args:
        eos_token: the tokenizer's, as some templates write it.
    """
    chat = [*_CHAT, {"role": "assistant", "content": _REPLY}]
    text = _rendered(template, messages=chat, add_generation_prompt=False, eos_token=eos_token)
    return None if text is None or _REPLY not in text else text.rpartition(_REPLY)[2]


def _rendered(template: str, **variables: object) -> str | None:
    environment = _environment()
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        return environment.from_string(template).render(bos_token="", **variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        # Written for a chat of another form, or for an extension of its own tokenizer.
        return None


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja's environment, with the extensions that transformers and vLLM render templates with."""
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the chat template {path} cannot be read: {error}") from error
    if not text.strip():
        raise SetupError(f"the chat template {path} is empty: give another template, --chat-template FILE")
    return text


def _in_json(path: Path) -> str:
    """The template of a JSON file; of several by name the default one; "" if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}: download the model again, completely") from error
    found = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


# Thinking -------------------------------------------------------------------------------------------------------------
# A model's thinking mode, read from its chat template.
#
# A template has a switch for thinking, or opens the thinking itself, or has neither. The mode is read from two
# renderings of one chat, so the same rule serves a template's text and an engine's `/tokenize`.

# The switches of chat templates: Qwen, GLM, Gemma and most others have the first, DeepSeek and Granite the second.
# Templates ignore what they do not know.
SWITCHES = ("enable_thinking", "thinking")
# Marks that open and close thinking in a rendered prompt.
_BRACKETS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
CLOSES_THINKING = frozenset(closes for _, closes in _BRACKETS)
# Mistral's models think because the system prompt of their template asks them to, and shows the brackets.
_BY_PROMPT = "[THINK]"
# gpt-oss writes to channels, and to `analysis` first; its template only says so.
_CHANNELS = "Valid channels: analysis"


class Thinking(StrEnum):
    """A model's thinking mode."""

    NEVER = "never"
    OPTIONAL = "optional"  # a request can switch it on and off
    ALWAYS = "always"  # nothing can switch it off


def switched(on: bool) -> dict[str, bool]:
    """A request's `chat_template_kwargs` that switch thinking on or off."""
    return dict.fromkeys(SWITCHES, on)


def thinking_of(switched_on: str, switched_off: str) -> Thinking:
    """
    Args:
        switched_on, switched_off: the same chat with the prompt for a reply, rendered with each setting of the switch.
    """
    is_open = any(switched_off.rfind(opens) > switched_off.rfind(closes) for opens, closes in _BRACKETS)
    if is_open or _CHANNELS in switched_off:
        return Thinking.ALWAYS
    asked_for = any(closes in switched_off for opens, closes in _BRACKETS if opens == _BY_PROMPT)
    return Thinking.OPTIONAL if asked_for or switched_on != switched_off else Thinking.NEVER
