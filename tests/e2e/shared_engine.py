"""Chats and a judge that ask one engine, as gateways and judge workers do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import orjson
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from clawloop.core.contracts.serving import Engine, RouteKey
from clawloop.core.judging.prompts import AnswerForm, vote_prompt
from clawloop.serving.chat import ChatEngines
from clawloop.serving.endpoints import Endpoint, place_in_queue
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rotation import Rotation
from tests.unit.judging.conversations import TURN, evidence

SEQS = 64
"""The engine's `--max-num-seqs`."""


class Chats:
    """Chats of several keys by the gateway's own way to an engine, and when each ended."""

    def __init__(self, url: str, places: int | None) -> None:
        self._engine = Engine("e", url, {}, False)
        self.rotation = Rotation(
            lambda: [self._engine],
            hold_seconds=60,
            hold_limit=9,
            held=Gauge("held", "held", registry=CollectorRegistry()),
            places=places,
        )
        self.rotation.mark("e", healthy=True)
        self.engines = ChatEngines(self.rotation, lambda: [self._engine])
        self.began = 0
        self.ended: list[float] = []

    async def chat(self, key: int, tokens: int, choices: int = 1, *, stream: bool = True, later: int = 0) -> None:
        """One chat to its end. A reply as a whole leaves the client's core to the engine.

        Args:
            later: seconds that its gateway's clock is ahead.
        """
        body: dict[str, Any] = {
            "model": "tiny-random",
            "messages": [{"role": "user", "content": f"Tell {key} a tale."}],
        }
        body |= {"n": choices, "max_tokens": tokens, "ignore_eos": True, "stream": stream, **place_in_queue(later)}
        route = RouteKey("default", 0, "tiny-random", str(key), owner=str(key), choices=choices)
        async with self.engines.open_chat(route, orjson.dumps(body)) as answer:
            if stream:
                seen = False
                async for _ in answer.events():
                    self.began += not seen
                    seen = True
            else:
                await answer.body()
        self.ended.append(time.monotonic())

    async def begun(self, count: int) -> None:
        while self.began < count:
            await asyncio.sleep(0.01)


async def sequences(url: str, *, running: int, waiting: int = 0) -> None:
    """Wait until the engine runs so many sequences and has so many in its queue."""
    # No timeout: a full engine's API server answers late where it has little of a core.
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        while True:
            families = text_string_to_metric_families((await client.get("/metrics")).text)
            gauges = {sample.name: sample.value for family in families for sample in family.samples}
            if gauges["vllm:num_requests_running"] >= running and gauges["vllm:num_requests_waiting"] >= waiting:
                return
            await asyncio.sleep(0.1)


async def vote(url: str, *, with_chats: bool) -> float:
    """Ask for a vote; when it was answered."""
    prompt = vote_prompt(TURN, evidence(answer="No, in Python."), AnswerForm.GRAMMAR)
    here = [Endpoint(url, "tiny-random")]
    async with JudgeClient(lambda policy: here, AnswerForm.GRAMMAR, with_chats=with_chats) as judge:
        assert len(await judge.answers("default", prompt, 3, 0.6)) == 3
    return time.monotonic()
