"""Clients that chat until stopped, each in sessions of its own, and keep what they saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

# Far above a reply's time on a busy machine; what fails then hangs.
PATIENCE_SECONDS = 30.0
# Short histories keep prompts small.
MESSAGES = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """A reply whose end the client saw.

    Args:
        model: the version that answered, by the name it is served under.
    """

    session: int
    number: int
    response_id: str
    before: str | None
    model: str
    text: str


@dataclass
class Chatters:
    """
    Args:
        think_seconds: pause of each user between an answer and the next message, on average.
        closing: users with an odd number end their session with every `MESSAGES`th message, and begin another one.

    Attributes:
        seen: all replies whose end a client saw.
        ended: the names of the sessions whose last reply a client saw.
        failures: why requests failed, how often, since the last `take_failures`.
    """

    url: str
    key: str
    think_seconds: float = 1.0
    closing: bool = False
    seen: list[Seen] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, sessions: int, seed: int, first: int = 0) -> None:
        """
        Args:
            first: the number of the first session; a number must not be that of an earlier session of the same stack.
        """
        self._tasks = [
            asyncio.create_task(self._chat(number, random.Random(f"{seed}/{number}")))
            for number in range(first, first + sessions)
        ]

    async def end(self) -> None:
        self.stop = True
        await asyncio.gather(*self._tasks)

    def raise_if_ended(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    def take_failures(self) -> Counter[str]:
        taken, self.failures = self.failures, Counter()
        return taken

    async def _chat(self, session: int, chance: random.Random) -> None:
        history: list[dict[str, Any]] = []
        before: str | None = None
        number = 0
        async with self._client() as client:
            while not self.stop:
                number += 1
                message = {"role": "user", "content": f"s{session}q{number} please go on"}
                messages = [*history, message]
                name, ends = self._session(session, number)
                headers = {"X-Session-Id": name} | ({"X-Session-Done": "true"} if ends else {})
                # What is answered with lessons is not trained, and every step would be one of practice.
                headers |= {} if session % 4 == 0 else {"X-Clawloop-Lessons": "off"}
                answer = await self._answer(client, messages, headers)
                if answer is None:
                    return
                response_id, text, model = answer
                self.seen.append(Seen(session, number, response_id, before, model, text))
                if ends:
                    self.ended.append(name)
                before = response_id
                history = [*messages, {"role": "assistant", "content": text}]
                if number % MESSAGES == 0 or not text:  # an empty reply is nobody's parent
                    history, before = [], None
                await asyncio.sleep(chance.uniform(0, 2 * self.think_seconds))

    def _session(self, user: int, number: int) -> tuple[str, bool]:
        """The session of a user's message, and whether the message ends it."""
        if not self.closing or user % 2 == 0:
            return f"s{user}", False
        return f"s{user}-{(number - 1) // MESSAGES}", number % MESSAGES == 0

    async def _answer(
        self, client: httpx.AsyncClient, messages: list[dict[str, Any]], headers: dict[str, str]
    ) -> tuple[str, str, str] | None:
        """Send until an answer came whole: its id, text and model; None once stopped."""
        body = {"model": "policy", "messages": messages, "stream": True, "max_tokens": 8}
        while not self.stop:
            failure, response_id, text, model = await exchange(client, body, headers)
            if failure is None:
                return response_id, text, model
            self.failures[failure] += 1
            await asyncio.sleep(0.1)
        return None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=PATIENCE_SECONDS
        )

    async def first_answer(self, within_seconds: float) -> float:
        """How long a new client waits for a whole answer, with retries."""
        began = time.monotonic()
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 2}
        headers = {"X-Session-Id": "probe", "X-Turn-Type": "side"}
        async with asyncio.timeout(within_seconds), self._client() as client:
            while (failure := (await exchange(client, body, headers))[0]) is not None:
                self.failures[failure] += 1
                await asyncio.sleep(0.05)
        return time.monotonic() - began


async def exchange(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> tuple[str | None, str, str, str]:
    """Why it failed, or None; response id, text and model of a whole answer."""
    try:
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    except httpx.TransportError as error:
        return type(error).__name__, "", "", ""
    if answer.status_code != 200:
        return f"{answer.status_code} {_code(answer)}", "", "", ""
    if not answer.text.endswith("data: [DONE]\n\n"):
        return f"stream ended: {_code_of_stream(answer.text)}", "", "", ""
    chunks = [orjson.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    return None, chunks[0]["id"], text, chunks[0]["model"]


def inexcusable(failures: Counter[str]) -> list[str]:
    """Those that no fault excuses: the gateway refuses the request itself, or blames itself."""
    blamed = ("4", "500", "stream ended: internal_error")
    return [f"{count} chats failed: {why}" for why, count in failures.items() if why.startswith(blamed)]


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "without a code"


def _code_of_stream(text: str) -> str:
    last = text.strip().rsplit("data: ", 1)[-1]
    try:
        return str(orjson.loads(last)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "cut"
