"""Reasons that operators give for a pause; people read them beside the state they explain."""

from __future__ import annotations

from clawloop.errors import ValueRejected

REASON_CHARACTERS = 500
"""A reason stands in one line of the page and of `status`; a longer text belongs elsewhere."""


def check_reason(reason: str) -> str:
    """The reason, without space around it.

    Raises:
        ValueRejected: it says nothing, or too much.
    """
    if not 0 < len(stripped := reason.strip()) <= REASON_CHARACTERS:
        raise ValueRejected(f"A reason has 1 to {REASON_CHARACTERS} characters.", field="reason")
    return stripped
