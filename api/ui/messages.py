"""Messages of a chat as blocks of text that a template shows: what was said, thinking, tool calls and results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import is_volatile
from clawloop.core.turns.files import described, references_of
from clawloop.core.turns.files import kind_of_part as kind_of_file
from clawloop.core.turns.thinking import THINKING_PARTS

# Blocks ---------------------------------------------------------------------------------------------------------------

# A screen shows some 3,000 characters; a longer block costs the browser more than it tells.
BLOCK_CHARACTERS = 20_000
# Arguments of tools that run what they are given.
_SCRIPTS = ("command", "cmd", "code", "script")
_THINKING_FIELDS = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Block:
    """
    Args:
        kind: `text`, `thinking`, `call`, `result`, `file` or `other`.
        title: of a call: the tool's name; of other parts: what they are.
        cut: how many characters were left out at the end.
        sha256: of a file that is stored; empty: none is.
        is_picture: browsers show the file.
    """

    kind: str
    text: str
    title: str = ""
    cut: int = 0
    sha256: str = ""
    is_picture: bool = False


def blocks_of(message: Message) -> list[Block]:
    """The blocks of one message, in order. Never raises for a message of any JSON shape."""
    blocks = [_block("thinking", value) for field in _THINKING_FIELDS if isinstance(value := message.get(field), str)]
    content = message.get("content")
    is_result = message.get("role") == "tool"
    for part in content if isinstance(content, list) else [content]:
        blocks += _part_blocks(part, is_result)
    calls = message.get("tool_calls")
    blocks += [_call_block(call) for call in calls] if isinstance(calls, list) else []
    return [block for block in blocks if block.text or block.title]


def first_words(messages: Sequence[Message], characters: int = 90) -> str:
    """Text of the first user message, shortened; empty if there is none."""
    for message in messages:
        if message.get("role") == "user" and not is_volatile(message):
            words = " ".join(" ".join(block.text for block in blocks_of(message) if block.kind == "text").split())
            if words:
                return _shortened(words, characters)
    return ""


def reply_words(message: Message, characters: int = 300) -> str:
    """A reply's text and calls on one line, shortened."""
    said = [
        block.text if block.kind == "text" else f"[{block.title}]"
        for block in blocks_of(message)
        if block.kind in ("text", "call")
    ]
    return _shortened(" ".join(" ".join(said).split()), characters)


def _shortened(words: str, characters: int) -> str:
    return words if len(words) <= characters else words[: characters - 1].rstrip() + "…"


def _part_blocks(part: JsonValue, is_result: bool) -> list[Block]:
    kind = "result" if is_result else "text"
    if part is None:
        return []
    if isinstance(part, str):
        return [_block(kind, part)] if is_result else _split_thinking(part)
    if isinstance(part, dict):
        kind_of_part = str(part.get("type") or "part")
        if kind_of_part in THINKING_PARTS:
            return [_block("thinking", str(part.get("thinking") or part.get("text") or part.get("reasoning") or ""))]
        if isinstance(text := part.get("text"), str):
            return [_block(kind, text)]
        return _file_blocks(part) or [_block("other", _json(part), kind_of_part)]
    return [_block("other", _json(part), "part")]


def _file_blocks(part: dict[str, JsonValue]) -> list[Block]:
    kind = kind_of_file(part)
    if kind is None:
        return []
    return [
        Block("file", "", described(file, kind), sha256=file.sha256, is_picture=file.width is not None)
        for file in references_of(part)
    ]


def _split_thinking(text: str) -> list[Block]:
    """Thinking that a reply begins with, and the rest; the opening tag may have been in the prompt."""
    before, close, after = text.partition("</think>")
    if close and "<think>" not in before.lstrip().removeprefix("<think>"):
        thinking = before.lstrip().removeprefix("<think>").strip()
        return [_block("thinking", thinking), _block("text", after.strip())]
    return [_block("text", text)]


def _call_block(call: Any) -> Block:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _block("other", _json(call), "tool call")
    arguments = function.get("arguments")
    shown = arguments if isinstance(arguments, str) else _json(arguments)
    return _block("call", _script(shown) or shown, str(function.get("name")))


def _script(arguments: str) -> str:
    """The command or program that is a call's only argument; empty if it has others."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict) or len(given) != 1:
        return ""
    [(name, value)] = given.items()
    return value if name in _SCRIPTS and isinstance(value, str) else ""


def _block(kind: str, text: str, title: str = "") -> Block:
    # A lone surrogate has no form in UTF-8.
    shown = text[:BLOCK_CHARACTERS].encode("utf-8", "replace").decode()
    title = title[:200].encode("utf-8", "replace").decode()
    return Block(kind, shown, title, max(0, len(text) - BLOCK_CHARACTERS))


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


# Diffs ----------------------------------------------------------------------------------------------------------------
# Lines of a unified diff, as `diff -u` and `git diff` print it.

_HUNK = re.compile(r"^@@ -\d+(,\d+)? \+\d+(,\d+)? @@", re.MULTILINE)


def diff_lines(text: str) -> list[tuple[str, str]] | None:
    """The lines of a diff, each with `add`, `remove` or nothing; None: the text is no diff."""
    return marked_lines(text.splitlines()) if _HUNK.search(text) else None


def marked_lines(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Each line of a diff with `add`, `remove` or nothing."""
    return [("" if line.startswith(("+++ ", "--- ")) else _MARKS.get(line[:1], ""), line) for line in lines]


_MARKS = {"+": "add", "-": "remove"}


# Markdown -------------------------------------------------------------------------------------------------------------
# Lists, tables, headings, emphasis and code of a reply; all else stays text, above all HTML, links and pictures.

# Of 10,000 characters that are all marks it takes a third of a second, while chats wait; of prose some milliseconds.
MARKDOWN_CHARACTERS = 10_000
_MARKDOWN = MarkdownIt("zero", {"breaks": True}).enable(
    ["table", "code", "fence", "blockquote", "hr", "list", "heading", "newline", "escape", "backticks", "emphasis"]
)
_PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak"}


def structured(text: str) -> Markup | None:
    """A reply's Markdown as HTML; None if it has none or is too long, and is shown as it is."""
    tokens = _MARKDOWN.parse(text) if len(text) <= MARKDOWN_CHARACTERS else []
    if all(token.type in _PLAIN for each in tokens for token in (each, *(each.children or ()))):
        return None
    for token in tokens:
        _fit(token)
    return Markup(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))


def _fit(token: Token) -> None:
    """Make a part fit the page, which has headings of its own and takes no styles in its HTML."""
    match token.type:
        case "heading_open":
            token.tag, token.attrs = "p", {"class": "heading"}
        case "heading_close":
            token.tag = "p"
        case "th_open" | "td_open":
            token.attrs = {}
        case "fence":
            token.info = ""
