"""A model's thinking mode, read from its chat template.

A template has a switch for thinking, or opens the thinking itself, or has neither. The mode is read from two renderings
of one chat, so the same rule serves a template's text and an engine's `/tokenize`.
"""

from __future__ import annotations

from enum import StrEnum

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
