"""One request as an engine gets it, and what was changed for that engine's model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import JsonValue

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.serving import ServedModel
from clawloop.core.errors import EngineRejected
from clawloop.core.families.orders import OF_TOOLS, SENT_BY, request_as_sent
from clawloop.core.lessons.prompt import DEFAULT_SYSTEM, has_system, with_lessons

# Not sampling settings of the turn: recorded elsewhere, or about the client and not the tokens.
_NOT_SAMPLING = frozenset(
    {
        "messages",
        "prompt",
        "tools",
        "model",
        "stream",
        "stream_options",
        "user",
        "return_token_ids",
        "logprobs",
        "top_logprobs",
    }
)
_LIMITS = ("max_completion_tokens", "max_tokens")
# What vLLM says of a limit beyond the context: this version, and earlier ones, which want room for prompt and reply.
_LIMIT_TOO_LARGE = (
    re.compile(r"tokens=\d+ cannot be greater than max_model_len ?= ?(?P<context>\d+)"),
    re.compile(r"maximum context length is (?P<context>\d+) tokens\b.*?requested \d+ tokens \((?P<prompt>\d+) in the"),
    re.compile(r"maximum context length is (?P<context>\d+) tokens and your request has (?P<prompt>\d+) input tokens"),
    re.compile(
        r"maximum context length is (?P<context>\d+) tokens\b.*?requested \d+ output tokens and your prompt contains "
        r"(?:at least )?(?P<prompt>\d+)"
    ),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """
    Args:
        body: the engine's request, without `model`.
        rules: those by which messages were changed; empty if they went as they came.
        ignored: the client's fields that the model knows nothing of.
        limit: tokens of a reply, as the client asked; None: as many as fit.
        context: of the model; None: not known.
        default_system: what the template says without a system message, where lessons came in its place.
    """

    body: dict[str, Any]
    rules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    limit: int | None = None
    context: int | None = None
    default_system: str = ""

    @property
    def sampling(self) -> dict[str, JsonValue]:
        """Every setting that shaped the tokens."""
        sent = {name: value for name, value in self.body.items() if name not in _NOT_SAMPLING}
        sent |= {DEFAULT_SYSTEM: self.default_system} if self.default_system else {}
        return sent | ({SENT_BY: list(self.rules)} if self.rules else {})

    def changed(self, prompt: int | None) -> tuple[str, ...]:
        """The changes to the client's request, as the header `X-Clawloop-Changed` names them.

        Args:
            prompt: its tokens; None: not known.
        """
        changes = ("roles",) if self.rules else ()
        if self.limit is None or self.context is None:
            return changes
        fits = self.context - (prompt or 0)
        return (*changes, f"max_tokens={fits}") if self.limit > fits else changes


class Room(NamedTuple):
    """Tokens of the context, and of a reply, by an engine that refused more."""

    context: int
    reply: int


def sent_to(
    model: ServedModel, body: dict[str, Any], room: Room | None = None, lessons: Sequence[ShownLesson] = ()
) -> Sent:
    """The request for an engine with this model.

    A limit of the reply that exceeds the context is cut to it, and vLLM cuts it to what the prompt leaves; only a limit
    beyond the context is an error there. So no request has to be counted first.

    Args:
        body: what the client asked, without `model`.
        room: by an engine that refused more; None: not known.
        lessons: that the prompt is to hold.
    """
    default_system = ""
    if lessons:
        default_system = "" if has_system(body["messages"]) else model.default_system
        texts = [lesson.text for lesson in lessons]
        body = body | {"messages": with_lessons(body["messages"], texts, default_system)}
    sent = request_as_sent(body, model.rules)
    rules = tuple(sorted(model.rules)) if sent.get("messages") is not body.get("messages") else ()
    ignored = tuple(name for name in OF_TOOLS if body.get(name) is not None and name not in sent)
    context = model.context if room is None else room.context
    most = model.context if room is None else room.reply
    limits = [body[name] for name in _LIMITS if isinstance(body.get(name), int)]
    if most is not None and any(limit > most for limit in limits):
        sent = sent | {name: min(body[name], most) for name in _LIMITS if isinstance(body.get(name), int)}
    return Sent(sent, rules, ignored, limits[0] if limits else None, context, default_system)


def room_left(error: EngineRejected) -> Room | None:
    """The room that an engine says there is, which refused a longer reply; None if it refused something else.

    For engines that did not say their context, and those that want room for the prompt as well.
    """
    if error.status != 400:
        return None
    for form in _LIMIT_TOO_LARGE:
        if found := form.search(str(error.error.get("message"))):
            context = int(found["context"])
            left = context - int(found.groupdict().get("prompt") or 0)
            return Room(context, left) if left > 0 else None
    return None
