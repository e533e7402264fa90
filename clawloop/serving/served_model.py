"""Asks an engine once what its model takes: the context, and the orders of roles of its chat template."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from clawloop.core.contracts.serving import ServedModel
from clawloop.core.families.orders import Probe, Rule, probing

# A busy engine's event loop takes some seconds; each of the few dozen renderings, milliseconds.
READ_SECONDS = 20.0


async def read_model(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> ServedModel | None:
    """Context length and template rules of an engine's model; None if the engine did not tell them now.

    A server that lists its models and renders no chats is taken to take every order.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            async with session.get(f"{url}/v1/models", headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                name, context = _base_model(await answer.json(content_type=None))
            return ServedModel(context, await _rules(session, url, headers, name))
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
        return None


def _base_model(listed: Any) -> tuple[str | None, int | None]:
    models = listed.get("data") if isinstance(listed, dict) else None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and model.get("parent") is None:
            context = model.get("max_model_len")
            return str(model.get("id")), context if type(context) is int and context > 0 else None
    return None, None


async def _rules(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], name: str | None
) -> frozenset[Rule]:
    asking = probing()
    try:
        probe = next(asking)
        while True:
            probe = asking.send(await _rendered(session, url, headers, name, probe))
    except StopIteration as end:
        rules: frozenset[Rule] = end.value
        return rules


async def _rendered(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], name: str | None, probe: Probe
) -> list[object] | None:
    """The token ids; None if the engine refuses the chat, or has no such route.

    Raises:
        ConnectionError: it cannot answer now.
    """
    body: dict[str, Any] = {"messages": probe.messages, "add_generation_prompt": True}
    body |= {} if name is None else {"model": name}
    body |= {} if probe.tools is None else {"tools": probe.tools}
    async with session.post(f"{url}/tokenize", json=body, headers=headers, allow_redirects=False) as answer:
        if answer.status in (401, 403, 429, 502, 503, 504):
            raise ConnectionError(f"the engine answered {answer.status}")
        if answer.status != 200:  # 500 where a template fails on what it was not written for
            return None
        reply = await answer.json(content_type=None)
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    return tokens if isinstance(tokens, list) else None
