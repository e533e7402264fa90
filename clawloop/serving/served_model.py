"""Limits of the models that engines serve: their context, the orders of roles their templates take, their system text.

Whoever sends a chat to an engine asks here first, and brings the chat into an order that the template takes
(`families/orders.py`): gateway, judge, probes, renderer and evaluation.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import aiohttp

from clawloop.core.contracts.serving import ServedModel
from clawloop.core.families.orders import Probe, Rendered, Rule, probing

# A busy engine's event loop takes some seconds; each of the few dozen renderings, milliseconds.
READ_SECONDS = 20.0
# The server lists no models, or renders no chats, and never will.
_NO_ROUTE = frozenset({404, 405, 501})
# The server refuses the chat; any other status may be of the moment.
_REFUSED = _NO_ROUTE | {400, 413, 415, 422}
# A template that fails on what it was not written for may be a 500, and so is an engine in trouble. As often a chat is
# asked about again, each time after one that the template takes.
_ASKED_AGAIN = 2
# A system message whose place in a rendered chat shows what stands there without one.
_MARKER = "blue 1"


@dataclass
class _Asking:
    """A probing that may be interrupted, and goes on with the chat that it waits for."""

    model: str | None
    context: int | None
    probing: Generator[Probe, Rendered, frozenset[Rule]]
    plain: Probe
    next: Probe
    rules: frozenset[Rule] | None = None  # known once the probing ended


class ServedModels:
    """The context and template rules of the models at some addresses; each is asked once.

    Args:
        known_seconds: after so long an engine is asked anew, for it may have restarted with another model or template;
            None: never, because the caller sees restarts and says so by `forget`.
    """

    def __init__(self, known_seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._known_seconds = known_seconds
        self._clock = clock
        self._known: dict[str, tuple[ServedModel, float]] = {}  # by address, with the time of the answer
        self._asking: dict[str, _Asking] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def known(self, url: str) -> ServedModel | None:
        """The model at this address; None if it did not say, or too long ago."""
        model, since = self._known.get(url, (None, 0.0))
        is_old = self._known_seconds is not None and self._clock() - since > self._known_seconds
        return None if is_old else model

    def forget(self, url: str) -> None:
        """Forget the model at this address, since another model may answer there from now on."""
        self._known.pop(url, None)
        self._asking.pop(url, None)

    async def learn(
        self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], name: str | None = None
    ) -> ServedModel | None:
        """The model at this address; None if the engine did not tell all now, and the next call asks for the rest.

        A server without a list of models, or one that renders no chats, is taken to take every order.

        Args:
            name: the model's, where a server lists several; else its first base model is asked about.
        """
        async with self._locks[url]:
            if (known := self.known(url)) is not None:
                return known
            try:
                async with asyncio.timeout(READ_SECONDS):
                    model = await self._ask(session, url, headers, name)
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
                return None
            self._asking.pop(url, None)
            self._known[url] = model, self._clock()
            return model

    async def _ask(
        self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], name: str | None
    ) -> ServedModel:
        if (asking := self._asking.get(url)) is None:
            async with session.get(f"{url}/v1/models", headers=headers, allow_redirects=False) as answer:
                if answer.status in _NO_ROUTE:
                    return ServedModel()
                if answer.status != 200:
                    raise ConnectionError(f"the engine answered {answer.status}")
                model, context = _base_model(await answer.json(content_type=None), name)
            steps = probing()
            first = next(steps)
            asking = self._asking[url] = _Asking(model, context, steps, first, first)
        while asking.rules is None:
            rendered = await _rendered(session, url, headers, asking, asking.next)
            try:
                asking.next = asking.probing.send(rendered)
            except StopIteration as end:
                asking.rules = end.value
        default_system = await _default_system(session, url, headers, asking)
        return ServedModel(asking.context, asking.rules, default_system)


def _base_model(listed: Any, name: str | None) -> tuple[str | None, int | None]:
    models = listed.get("data") if isinstance(listed, dict) else None
    bases = [
        model
        for model in (models if isinstance(models, list) else ())
        if isinstance(model, dict) and model.get("parent") is None
    ]
    for model in sorted(bases, key=lambda model: model.get("id") != name):
        context = model.get("max_model_len")
        return str(model.get("id")), context if type(context) is int and context > 0 else None
    return None, None


async def _rendered(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], asking: _Asking, probe: Probe
) -> list[object] | None:
    """The token ids; None if the engine refuses the chat, or has no such route.

    Raises:
        ConnectionError: it cannot answer now.
    """
    status, tokens = await _tokenize(session, url, headers, asking.model, probe)
    for _ in range(_ASKED_AGAIN):
        if status != 500:
            break
        status, _none = await _tokenize(session, url, headers, asking.model, asking.plain)
        if status != 200:
            raise ConnectionError(f"the engine answered {status}")
        status, tokens = await _tokenize(session, url, headers, asking.model, probe)
    if status == 200 or status in _REFUSED or (status == 500 and probe is not asking.plain):
        return tokens
    raise ConnectionError(f"the engine answered {status}")


async def _default_system(session: aiohttp.ClientSession, url: str, headers: dict[str, str], asking: _Asking) -> str:
    """The text that the template says in place of a system message; empty if it says none, or the engine tells none.

    Raises:
        ConnectionError: it cannot answer now.
    """
    asked = [{"role": "user", "content": "red 0"}]
    texts: list[str] = []
    for messages in (asked, [{"role": "system", "content": _MARKER}, *asked]):
        tokens = await _rendered(session, url, headers, asking, Probe(messages))
        text = None if tokens is None else await _text_of(session, url, headers, asking.model, tokens)
        if text is None:
            return ""
        texts.append(text)
    without, with_marker = texts
    before, marker, after = with_marker.partition(_MARKER)
    said = len(without) - len(before) - len(after)
    if not marker or said <= 0 or not (without.startswith(before) and without.endswith(after)):
        return ""
    return without[len(before) : len(before) + said]


async def _text_of(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], model: str | None, tokens: list[object]
) -> str | None:
    """The text of these tokens; None if the engine does not tell."""
    body: dict[str, Any] = {"tokens": tokens} | ({} if model is None else {"model": model})
    async with session.post(f"{url}/detokenize", json=body, headers=headers, allow_redirects=False) as answer:
        if answer.status in _REFUSED:
            return None
        if answer.status != 200:
            raise ConnectionError(f"the engine answered {answer.status}")
        reply = await answer.json(content_type=None)
    text = reply.get("prompt") if isinstance(reply, dict) else None
    return text if isinstance(text, str) else None


async def _tokenize(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], model: str | None, probe: Probe
) -> tuple[int, list[object] | None]:
    body: dict[str, Any] = {"messages": probe.messages, "add_generation_prompt": True}
    body |= {} if model is None else {"model": model}
    body |= {} if probe.tools is None else {"tools": probe.tools}
    async with session.post(f"{url}/tokenize", json=body, headers=headers, allow_redirects=False) as answer:
        if answer.status != 200:
            return answer.status, None
        reply = await answer.json(content_type=None)
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    return 200, tokens if isinstance(tokens, list) else None
