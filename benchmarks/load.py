"""Streams through one server, many at once, and what each of them took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

_DONE = b"data: [DONE]"


@dataclass
class Load:
    """What the streams through one server took, over all its turns in a case.

    Attributes:
        first_seconds, whole_seconds: of each answer, to its first byte and to its last.
        wall_seconds: in which they were answered; cpu_seconds: of the server's processes; None: not measured.
        failures: answers that did not come to their end.
        backlogs: turns that were not announced to Temporal when a turn of this server ended, and how many seconds later
            all were; None: not while it was waited for.
    """

    first_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0
    cpu_seconds: float | None = None
    failures: list[str] = field(default_factory=list)
    backlogs: list[tuple[int, float | None]] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.whole_seconds) / self.wall_seconds


def prompt(tokens: int, number: int) -> str:
    """A text of about that many tokens, four bytes each, unlike any other's from its first word on."""
    return f"{number:08d} " + "what " * (tokens * 4 // 5)


async def stream(client: aiohttp.ClientSession, url: str, body: Mapping[str, object], session: str, load: Load) -> None:
    """Send one request and read its answer to the end."""
    began = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/chat/completions", json=body, headers={"X-Session-Id": session}) as answer:
            first = await answer.content.readany()
            first_seconds = time.perf_counter() - began
            tail = first[-64:]
            async for piece in answer.content.iter_any():
                tail = (tail + piece)[-64:]
            if answer.status != 200 or _DONE not in tail:
                load.failures.append(f"{answer.status}: {tail!r}")
                return
    except (aiohttp.ClientError, TimeoutError) as error:
        load.failures.append(f"{type(error).__name__}: {error}")
        return
    load.first_seconds.append(first_seconds)
    load.whole_seconds.append(time.perf_counter() - began)


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def closed_loop(
    client: aiohttp.ClientSession,
    url: str,
    model: str,
    streams: int,
    requests: int,
    prompt_tokens: int,
    first_number: int,
    load: Load,
    max_tokens: int | None = None,
    spread_seconds: float = 0.0,
) -> None:
    """Keep `streams` requests under way until `requests` were sent, each with a prompt of its own.

    Args:
        spread_seconds: in which the streams begin, evenly; 0: all at once, so that they end together, too.
    """
    numbers = iter(range(first_number, first_number + requests))

    async def one(slot: int) -> None:
        await asyncio.sleep(spread_seconds * slot / streams)
        for number in numbers:
            body: dict[str, object] = {
                "model": model,
                "stream": True,
                "messages": [{"role": "user", "content": prompt(prompt_tokens, number)}],
            }
            if max_tokens is not None:
                body |= {"max_tokens": max_tokens, "ignore_eos": True}
            await stream(client, url, body, f"bench-{first_number}-{slot}", load)

    began = time.perf_counter()
    await asyncio.gather(*(one(slot) for slot in range(streams)))
    load.wall_seconds += time.perf_counter() - began
