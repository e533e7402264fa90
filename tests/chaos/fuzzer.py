"""Requests of any shape while faults are injected: in every wire format, and reads of the admin API.

Whatever is away, an answer is what was asked for, a refusal, or an error that says what is away; never a 500.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import response_schema_conformance
from schemathesis.core.failures import Failure, FailureGroup

from tests.api.known_ids import KNOWN_IDS, described_requests
from tests.api.test_any_shape import PROPER, REQUESTS, error_fields, headers_of

# As the chatting users, who wait far longer than a reply takes.
PATIENCE_SECONDS = 30.0
# What the gateway answers while something behind it is away.
AWAY = frozenset({502, 503, 504})
# Replies are short where the request leaves it open.
SHORT = {
    "/v1/chat/completions": {"max_tokens": 8},
    "/v1/completions": {"max_tokens": 8},
    "/v1/responses": {"max_output_tokens": 8},
}
HEALTH = ("/healthz", "/readyz", "/metrics")  # 503 is their word, in a form of its own


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Args:
        undescribed: how a success differs from what the API's description says of it.
    """

    status: int
    content: bytes
    undescribed: str | None = None


@dataclass
class Fuzzer:
    """
    Args:
        keys: by scope.
        pause_seconds: between two requests of a kind.
        examples: of each path.

    Attributes:
        answered: how often each path was answered with each status.
        unanswered: how often a request got no answer, by reason.
        problems: answers that no fault excuses, since `take_problems`.
    """

    url: str
    keys: dict[str, str]
    pause_seconds: float
    examples: int = 40
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Nothing may be away yet: the admin API is read from its description."""
        wire, admin = await asyncio.to_thread(self._generate)
        self._tasks = [asyncio.create_task(self._chat(wire)), asyncio.create_task(self._administer(admin))]

    async def end(self) -> None:
        self.stop = True
        await asyncio.gather(*self._tasks)

    def take_problems(self) -> list[str]:
        for task in self._tasks:
            if task.done():
                task.result()
        taken, self.problems = self.problems, []
        return taken

    def _generate(self) -> tuple[list[tuple[str, Any]], list[schemathesis.Case]]:
        bodies = [[(path, body) for body in self._bodies(path)] for path in REQUESTS]
        described = schemathesis.openapi.from_url(f"{self.url}/openapi.json", timeout=PATIENCE_SECONDS)
        operations = [operation.ok() for operation in described.get_all_operations()]
        cases = [
            _examples(described_requests(operation, KNOWN_IDS), 8)
            for operation in operations
            if operation.method.upper() == "GET"
        ]
        return _in_turn(bodies), _in_turn(cases)

    def _bodies(self, path: str) -> list[Any]:
        """Every other one is a proper request, which reaches what is away."""
        generated = _examples(REQUESTS[path], self.examples)
        return _in_turn([[PROPER[path]] * len(generated), generated]) if path in PROPER else generated

    async def _chat(self, wire: Sequence[tuple[str, Any]]) -> None:
        # Side turns: what nobody judges and no step trains, so that checks of both still know each turn.
        headers = {"Authorization": f"Bearer {self.keys['chat']}", "X-Turn-Type": "side"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_SECONDS) as client:

            async def send(path: str, body: Any) -> Answer:
                if isinstance(body, dict):
                    body = SHORT.get(path, {}) | body
                answer = await client.post(path, json=body, headers=headers_of(path))
                return Answer(answer.status_code, answer.content)

            await self._repeat([(path, partial(send, path, body)) for path, body in wire])

    async def _administer(self, cases: Sequence[schemathesis.Case]) -> None:
        def send(case: schemathesis.Case) -> Answer:
            key = self.keys["admin" if case.path.startswith("/admin") else "chat"]
            answer = case.call(headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS)
            undescribed = None
            if answer.status_code < 400:
                try:
                    case.validate_response(answer, checks=[response_schema_conformance])
                except (Failure, FailureGroup) as failure:
                    undescribed = f"which the API's description does not allow: {failure}"
            return Answer(answer.status_code, answer.content, undescribed)

        await self._repeat([(case.path, partial(asyncio.to_thread, send, case)) for case in cases])

    async def _repeat(self, sends: Sequence[tuple[str, Callable[[], Awaitable[Answer]]]]) -> None:
        for path, send in itertools.cycle(sends):
            if self.stop:
                return
            try:
                answer = await send()
            except (httpx.TransportError, OSError) as error:
                # The gateway was killed, or its connection cut; what schemathesis sends by ends in an OSError then.
                self.unanswered[type(error).__name__] += 1
            else:
                self.answered[path, answer.status] += 1
                problem = answer.undescribed or problem_of(path, answer.status, answer.content)
                if problem is not None:
                    self.problems.append(f"{path} answered {answer.status}, {problem}: {answer.content[:300]!r}")
            await asyncio.sleep(self.pause_seconds)


def _examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """The same each time."""
    found: list[Any] = []

    @given(example=strategy)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def _in_turn(lists: Sequence[list[Any]]) -> list[Any]:
    """One of each list, then the next of each."""
    return [item for items in itertools.zip_longest(*lists) for item in items if item is not None]


def problem_of(path: str, status: int, content: bytes) -> str | None:
    """What is wrong with an answer during a fault; None: nothing."""
    if status >= 500 and status not in AWAY:
        return "which blames the gateway"
    if status < 400 or path in HEALTH:
        return None
    try:
        body = httpx.Response(status, content=content).json()
        if path.startswith("/admin"):
            return None if body["status"] == status and body["detail"] else "without its reason"
        return None if set(cast(dict[str, Any], body["error"])) == error_fields(path) else "in another form"
    except (ValueError, LookupError, TypeError):
        return "in no form"
