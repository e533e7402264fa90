"""Streams through one server, many at once, and what each of them took."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from benchmarks.stub_engine import BYTES_PER_TOKEN

_DONE = b"data: [DONE]"
# Of a delta; `content` of its log-probs is a list.
_TEXT = re.compile(rb'"content": ?"([^"\\]*(?:\\.[^"\\]*)*)"')


@dataclass
class Load:
    """Times and failures of the streams through one server, over all its turns in a case.

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
    return f"{number:08d} " + "what " * (tokens * BYTES_PER_TOKEN // 5)


async def stream(
    client: aiohttp.ClientSession, url: str, body: Mapping[str, object], session: str | None, load: Load
) -> bytes | None:
    """Send one request and read its answer to the end.

    Returns:
        What was received; None if it did not come to its end.
    """
    headers = {} if session is None else {"X-Session-Id": session}
    began = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            pieces = [await answer.content.readany()]
            first_seconds = time.perf_counter() - began
            async for piece in answer.content.iter_any():
                pieces.append(piece)
    except (aiohttp.ClientError, TimeoutError) as error:
        load.failures.append(f"{type(error).__name__}: {error}")
        return None
    whole_seconds = time.perf_counter() - began
    received = b"".join(pieces)
    if answer.status != 200 or _DONE not in received[-64:]:
        load.failures.append(f"{answer.status}: {received[-64:]!r}")
        return None
    load.first_seconds.append(first_seconds)
    load.whole_seconds.append(whole_seconds)
    return received


def answer_text(received: bytes) -> str:
    """The text in a stream's events. They are not parsed, for the client's work would slow all servers alike."""
    text: str = json.loads(b'"%s"' % b"".join(_TEXT.findall(received)))
    return text


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True, slots=True)
class Chats:
    """Requests of the clients of a closed loop.

    Args:
        streams: requests under way at once.
        conversations: in all; each is a stream's own until its last turn.
        turns: of a conversation; each request holds the questions and answers before it.
        prompt_tokens: of a request, in the mean of a conversation's turns.
        growth_tokens: by which a request is longer than the one before it: an answer and a question.
        names_session: in a header, as OpenClaw does; else only what is said shows which conversation goes on.
        spread_seconds: in which the streams begin, evenly; 0: all at once, so that they end together, too.
    """

    streams: int
    conversations: int
    turns: int
    prompt_tokens: int
    growth_tokens: int
    names_session: bool
    spread_seconds: float = 0.0
    max_tokens: int | None = None

    @property
    def requests(self) -> int:
        return self.conversations * self.turns

    def tokens(self, turn: int) -> int:
        """Prompt tokens of a turn's request; turns count from 0."""
        return self.prompt_tokens + round((turn - (self.turns - 1) / 2) * self.growth_tokens)


async def closed_loop(
    client: aiohttp.ClientSession, url: str, model: str, chats: Chats, first_number: int, load: Load
) -> None:
    """Keep so many streams under way until all conversations have ended.

    Args:
        first_number: of the first request; no two requests may have the same.
    """
    conversations = iter(range(chats.conversations))

    async def one(slot: int) -> None:
        await asyncio.sleep(chats.spread_seconds * slot / chats.streams)
        for conversation in conversations:
            await converse(client, url, model, chats, first_number + conversation * chats.turns, load)

    began = time.perf_counter()
    await asyncio.gather(*(one(slot) for slot in range(chats.streams)))
    load.wall_seconds += time.perf_counter() - began


async def converse(
    client: aiohttp.ClientSession, url: str, model: str, chats: Chats, first_number: int, load: Load
) -> None:
    """One conversation, whose history holds what the server answered; it ends early if a request fails."""
    body: dict[str, object] = {"model": model, "stream": True}
    if chats.max_tokens is not None:
        body |= {"max_tokens": chats.max_tokens, "ignore_eos": True}
    session = f"bench-{first_number}" if chats.names_session else None
    messages: list[dict[str, str]] = []
    for turn in range(chats.turns):
        said = sum(len(message["content"].encode()) for message in messages) // BYTES_PER_TOKEN
        question = prompt(chats.tokens(turn) - said, first_number + turn)
        messages.append({"role": "user", "content": question})
        received = await stream(client, url, body | {"messages": messages}, session, load)
        if received is None or turn == chats.turns - 1:
            return
        messages.append({"role": "assistant", "content": answer_text(received)})
