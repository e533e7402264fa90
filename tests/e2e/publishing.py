"""Clients that stream through a gateway while versions are published, and their measurements."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import aiohttp
import orjson
import psycopg

from activities.serving.publishing import PublishingActivities, PublishVersion
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.training import VersionRef
from db.database import BACKGROUND_LIMIT, Database
from db.serving.publishing import PostgresPublishingStore
from db.training.steps import PostgresStepStore

TOKENS = 48
# Between publishes, so that some replies begin and end with each version.
PAUSE_SECONDS = 0.7


@dataclass(frozen=True, slots=True)
class Publish:
    """When a version was committed and when it became active, by this machine's clock."""

    began: float
    active: float

    @property
    def seconds(self) -> float:
        return self.active - self.began


@dataclass
class Listener:
    """Measurements of the clients.

    Attributes:
        gaps: when each ended that lies between two events of one stream, and its seconds.
        answers: response ids.
        errors: statuses other than 200, streams that broke off.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def gaps_between(self, began: float, ended: float) -> list[float]:
        """Lengths in seconds of the gaps that began in this period."""
        return [seconds for end, seconds in self.gaps if began <= end - seconds < ended]


@asynccontextmanager
async def chatting(
    url: str, key: str, clients: int, headers: Mapping[str, str] | None = None, sessions: str = ""
) -> AsyncIterator[Listener]:
    """Clients stream during the block; at its end each reads its current reply to the end.

    Args:
        headers: further ones, of each request.
        sessions: what their sessions' names begin with.
    """
    seen, stop = Listener(), asyncio.Event()
    sent = {"Authorization": f"Bearer {key}", **(headers or {})}
    talking = asyncio.create_task(_keep_chatting(url, sent, clients, sessions, seen, stop))
    try:
        yield seen
        stop.set()
        await talking
    finally:
        talking.cancel()
        await asyncio.wait([talking])


async def gaps_with_and_without(
    seen: Listener, publish: Callable[[], Awaitable[list[Publish]]]
) -> tuple[list[Publish], list[float], list[float]]:
    """The publishes, the gaps during them, and the gaps in an equally long period after them without publishing."""
    began = time.perf_counter()
    publishes = await publish()
    ended = time.perf_counter()
    await asyncio.sleep(ended - began)
    return publishes, seen.gaps_between(began, ended), seen.gaps_between(ended, 2 * ended - began)


async def _keep_chatting(
    url: str, headers: Mapping[str, str], clients: int, sessions: str, seen: Listener, stop: asyncio.Event
) -> None:
    """Each client has conversations of three turns, one after the other, until `stop` is set."""
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, headers=headers, timeout=limit) as session:
        async with asyncio.TaskGroup() as group:
            for client in range(clients):
                group.create_task(_chat(session, client, sessions, seen, stop))


async def _chat(
    session: aiohttp.ClientSession, client: int, sessions: str, seen: Listener, stop: asyncio.Event
) -> None:
    for conversation in itertools.count():
        messages: list[dict[str, str]] = []
        for turn in range(3):
            if stop.is_set():
                return
            messages.append({"role": "user", "content": f"Client {client}, tale {conversation}, part {turn}."})
            text = await _stream(session, f"{sessions}{client}-{conversation}", messages, seen)
            messages.append({"role": "assistant", "content": text})


async def _stream(session: aiohttp.ClientSession, name: str, messages: Sequence[object], seen: Listener) -> str:
    body = {"model": "policy", "messages": messages, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    text, ended, last, response = "", False, None, None
    async with session.post("/v1/chat/completions", json=body, headers={"X-Session-Id": name}) as answer:
        if answer.status != 200:
            seen.errors.append(f"{answer.status}: {await answer.text()}")
            return text
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if last is not None:
                seen.gaps.append((now, now - last))
            last = now
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            chunk = orjson.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                seen.errors.append(str(chunk["error"]))
                return text
            response = chunk["id"]
            text += chunk["choices"][0]["delta"].get("content") or ""
    if ended and response is not None:
        seen.answers.append(response)
    else:
        seen.errors.append("a stream broke off")
    return text


async def commit(database_url: str, version: VersionRef) -> None:
    """Insert the rows that a committed step leaves in the ledger."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute(
            "INSERT INTO versions (policy, n, parent, path, sha256) VALUES (%s, %s, %s, %s, decode(%s, 'hex'))",
            [version.policy, version.n, version.parent, version.path, version.sha256],
        )
        await connection.execute("UPDATE policies SET head = %s WHERE id = %s", [version.n, version.policy])


async def publish_all(database_url: str, temporal: str, versions: Sequence[VersionRef]) -> list[Publish]:
    """Commit and publish one version after the other, with pauses between them."""
    database = Database(database_url, BACKGROUND_LIMIT)
    notifier = TemporalNotifier(await connect(temporal), timedelta(hours=1))
    publishing = PublishingActivities(PostgresPublishingStore(database), PostgresStepStore(database), notifier)
    took = []
    try:
        for version in versions:
            await asyncio.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            await commit(database_url, version)
            done = await publishing.publish_version(PublishVersion(policy=version.policy))
            if done.version != version.n or done.missing:
                raise RuntimeError(f"version {version.n} was not published: {done}")
            took.append(Publish(began, time.perf_counter()))
    finally:
        await database.close()
    return took


def spread(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and maximum as text."""
    ordered = sorted(seconds)
    picks = {"median": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}
    return ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in picks.items())
