"""The hints of the demo's world, with paraphrases."""

from __future__ import annotations

from clawloop.demo.world import Style

HINTS: dict[Style, tuple[str, ...]] = {
    Style.PYTHON: (
        "Write the code in Python.",
        "Please write Python code.",
        "Use Python for code.",
        "The user prefers Python.",
    ),
    Style.JAVASCRIPT: (
        "Write the code in JavaScript.",
        "Please write JavaScript code.",
        "Use JavaScript for code.",
        "The user prefers JavaScript.",
    ),
    Style.CONCISE: (
        "Answer in one short sentence.",
        "Keep the answer short.",
        "Please be brief and concise.",
        "The user prefers short answers.",
    ),
    Style.DETAILED: (
        "Give a long and detailed answer.",
        "Please explain it in detail.",
        "Go into detail and say more.",
        "The user prefers detailed answers.",
    ),
    Style.FORMAL: (
        "Write in a formal tone.",
        "Please be formal and polite.",
        "Use formal language.",
        "The user prefers a formal tone.",
    ),
    Style.FRIENDLY: (
        "Write in a friendly tone.",
        "Please be friendly and casual.",
        "Use casual language.",
        "The user prefers a friendly tone.",
    ),
}
"""Hints for each style; the model as judge writes the first one."""
