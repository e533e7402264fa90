"""Requests with an episode's key: sampled as the trainer can use them, or refused."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from clawloop.core.errors import RequestRejected
from clawloop.core.samples.decision import sampling_problems

# The distribution that the trainer computes log-probs of; penalties and cuts of it are left out. So is a seed, by which
# all attempts at a task would be the same.
_SAMPLING: dict[str, JsonValue] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_LEFT_OUT = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "parallel_tool_calls",
    "seed",
)


def trainable_fields(fields: dict[str, Any], body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, JsonValue]]:
    """The engine's fields with sampling that the trainer can use, and what the client asked for instead.

    Args:
        fields: of the engine, with defaults filled in.
        body: the client's own.

    Raises:
        RequestRejected: 400; the client asks for more than one choice, a grammar, a forced tool, or another setting
            whose log-probs the trainer cannot reproduce.
    """
    if (body.get("n") or 1) != 1:
        raise RequestRejected("An episode's key takes one choice a request: leave `n` out.", field="n")
    sent = {name: value for name, value in fields.items() if name not in _LEFT_OUT} | _SAMPLING
    named = (*_SAMPLING, *_LEFT_OUT)
    asked = {name: body[name] for name in named if body.get(name) is not None and body[name] != _SAMPLING.get(name)}
    if problems := sampling_problems(sent, sent.get("tools")):
        raise RequestRejected(
            f"An episode's key does not take {', '.join(problems)}: its turns could not be trained. Leave it out.",
            code="invalid_value",
            field=problems[0] if problems[0] in body else None,
        )
    return sent, asked
