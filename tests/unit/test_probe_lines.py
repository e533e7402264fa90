"""What operators write as probes: each fault is named by its line."""

from __future__ import annotations

import json

from clawloop.operations.probes import read_probe_lines, read_probes


def test_lines_become_probes_and_empty_ones_are_skipped() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    lines = [
        {"prompt": "2 + 2?", "contains": "4"},
        {"messages": [{"role": "user", "content": "Look."}], "tools": tools, "contains": ["a", "b"], "regex": "^a"},
    ]
    probes, faults = read_probe_lines("\n\n".join(map(json.dumps, lines)))
    assert faults == {}
    assert [list(probe.contains) for probe in probes] == [["4"], ["a", "b"]]
    assert probes[0].messages == [{"role": "user", "content": "2 + 2?"}]
    assert (probes[1].tools, probes[1].regex, probes[1].exact) == (tools, "^a", None)


def test_a_text_may_hold_what_unicode_calls_a_line_end() -> None:
    probes, faults = read_probe_lines('{"prompt": "one\u2028two"}\r\n{"prompt": "three\x85four"}\n')
    assert faults == {}
    assert [probe.messages[0]["content"] for probe in probes] == ["one\u2028two", "three\x85four"]


def test_every_bad_line_is_named() -> None:
    bad = [
        "{",
        "[1]",
        "{}",
        '{"prompt": "a", "messages": []}',
        '{"prompt": 3}',
        '{"prompt": "a", "regex": "(a"}',
        '{"prompt": "a", "contain": "b"}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        '{"prompt": "a", "contains": ""}',
    ]
    probes, faults = read_probe_lines("\n".join(['{"prompt": "fine"}', *bad]))
    assert (len(probes), list(faults)) == (1, list(range(2, 11)))
    assert faults[2].startswith("not JSON")
    assert faults[3].startswith("no JSON object")
    assert faults[4] == "give either prompt or messages"
    assert faults[5].startswith("messages: List should have at least 1 item")
    assert faults[6] == "prompt: Input should be a valid string"
    assert "unclosed" in faults[7]
    assert faults[8] == "unknown key 'contain'; a probe has prompt, messages, tools, contains, regex, exact"
    assert faults[9].startswith("messages: the last message must be the user's or a tool's")
    assert faults[10].startswith("contains: ")


def test_a_long_probe_is_refused() -> None:
    _, faults = read_probes([{"prompt": "x" * 100_001}, {"messages": [{"role": "user", "content": "x" * 100_001}]}])
    assert sorted(faults) == [0, 1]
    assert faults[1] == "messages: longer than 100000 characters"
