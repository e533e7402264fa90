"""A model folder's chat template: its text, and what it renders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clawloop.errors import SetupError

# Files in which a folder may keep its template, the first that has one counts: the order of `transformers`.
_JSON_FILES = ("chat_template.json", "tokenizer_config.json")
_CHAT = [{"role": "user", "content": "Hello"}]


def read_template(folder: Path, given: Path | None = None) -> str:
    """The text of a model's chat template.

    Args:
        given: the operator's own, instead of the model's.

    Raises:
        SetupError: there is none, or it cannot be read.
    """
    if given is not None:
        return _read(given)
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    for name in _JSON_FILES:
        if (folder / name).is_file() and (found := _in_json(folder / name)):
            return found
    raise SetupError(
        f"{folder} has no chat template, so it cannot chat: choose the instruction-tuned model of its family, or give a"
        " template: --chat-template FILE"
    )


def render(template: str, switches: Mapping[str, bool]) -> str | None:
    """A short chat with the prompt for a reply; None if the template cannot render it here.

    Args:
        switches: further variables of the template.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=_CHAT, add_generation_prompt=True, bos_token="", eos_token="", **switches)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        # Written for a chat of another form, or for an extension of its own tokenizer.
        return None


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the chat template {path} cannot be read: {error}") from error
    if not text.strip():
        raise SetupError(f"the chat template {path} is empty: give another one, --chat-template FILE")
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
