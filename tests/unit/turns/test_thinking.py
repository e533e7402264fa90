"""Thinking that a text begins with."""

from __future__ import annotations

from clawloop.core.turns.thinking import without_leading_thinking


def test_thinking_is_what_a_text_begins_with() -> None:
    assert without_leading_thinking("<think>a</think>b") == "b"
    assert without_leading_thinking("  <think>a") == ""
    assert without_leading_thinking("a</think>b") == "b"
    assert without_leading_thinking("use <think> and </think> tags") == "use <think> and </think> tags"
