"""How long eight streams stand still while a judge's prompts are read, and how long a new chat waits to begin.

On one engine after another, on the CPU and with the same model: prompts read whole and judges before chats, as engines
were started once; and prompts read in pieces and chats first, as `clawloop up` starts them. Each engine is asked the
same twice: streams alone, and streams beside a judge that asks one long question after another and a new chat every
other second. Run as `make bench ARGS="streams FOLDER"`.

With `--adapter` the tokens/s of one, four and sixteen streams of the base model and of an adapter of rank 16 are
compared instead, without and with Clawloop's plugin of vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.processes import free_port
from benchmarks.report import load_now
from clawloop.serving.endpoints import JUDGE_BEHIND, place_in_queue
from clawloop.training.model.port import LoraShape
from tests.e2e.adapters import random_versions
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options

OUT = Path(__file__).parent / "results" / "streams.jsonl"
STREAMS, QUESTION_TOKENS, ANSWER_TOKENS, CHAT_TOKENS = 8, 1900, 8, 60
CONTEXT = 4096
NEW_CHAT_SECONDS = 2.0
_CACHE = ("--kv-cache-memory-bytes", str(2**30))
COLUMNS = {
    "longest_gap_s": "longest gap s",
    "median_gap_s": "median gap s",
    "tokens_per_s": "tokens/s",
    "first_token_s": "first token s, at most",
    "answer_s": "judge's answer s",
}
_UNCUT = ("--long-prefill-token-threshold", "0")
_BEFORE_CHATS = -1  # earlier than any second of our time


@dataclass(frozen=True, slots=True)
class Way:
    """One way to start an engine and to order its requests."""

    name: str
    further: tuple[str, ...]
    of_judge: Callable[[], dict[str, int]]
    seeded: bool = True  # without the plugin a `seed` in a prompt that is read in pieces ends the engine


WAYS = (
    Way(
        "whole prompts, judges first",
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT), *_UNCUT),
        lambda: {"priority": _BEFORE_CHATS},
    ),
    Way("pieces, chats first", (), lambda: place_in_queue(JUDGE_BEHIND)),
)


@dataclass
class Seen:
    """Times of tokens.

    Args:
        gaps: seconds between two tokens of a stream.
        first: seconds until the first token of a new chat.
        judged: seconds of each of a judge's answers.
    """

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    tokens: int = 0


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, way: Way) -> None:
        self._session, self._url, self._model, self._way = session, f"{url}/v1/completions", model, way
        self._random = random.Random(7)

    def prompt(self, tokens: int) -> list[int]:
        """Tokens that no earlier prompt begins with, so that no cache has them."""
        return [self._random.randrange(300, 5000) for _ in range(tokens)]

    async def stream(self, seen: Seen, tokens: int, *, is_new: bool = False) -> None:
        body = self._body(self.prompt(CHAT_TOKENS), tokens) | {"stream": True, **place_in_queue()}
        sent, times = time.monotonic(), []
        async with self._session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        if is_new:
            seen.first.append(times[0] - sent)
        else:
            seen.gaps += [after - before for before, after in pairwise(times)]
            seen.tokens += len(times)

    async def judge(self, seen: Seen) -> None:
        """Questions, one after another, until cancelled."""
        while True:
            sent = time.monotonic()
            body = self._body(self.prompt(QUESTION_TOKENS), ANSWER_TOKENS) | self._way.of_judge()
            async with self._session.post(self._url, json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            seen.judged.append(time.monotonic() - sent)

    async def new_chats(self, seen: Seen) -> None:
        while True:
            await asyncio.sleep(NEW_CHAT_SECONDS)
            await self.stream(seen, 1, is_new=True)

    def _body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.6,
        } | ({"seed": len(prompt)} if self._way.seeded else {})  # fmt: skip


async def measured(url: str, model: str, way: Way, tokens: int) -> list[dict[str, Any]]:
    """Figures of the streams alone, and beside a judge."""
    lines: list[dict[str, Any]] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, url, model, way)
        await client.stream(Seen(), 8)
        for beside in ("nothing", "a judge"):
            seen, began = Seen(), time.monotonic()
            async with _beside(client, seen, beside == "a judge"):
                await asyncio.gather(*(client.stream(seen, tokens) for _ in range(STREAMS)))
            seconds = time.monotonic() - began
            found = {
                "way": way.name, "beside": beside, "longest_gap_s": max(seen.gaps), "median_gap_s": median(seen.gaps),
                "tokens_per_s": seen.tokens / seconds, "first_token_s": max(seen.first, default=None),
                "judged": len(seen.judged), "answer_s": median(seen.judged) if seen.judged else None,
            }  # fmt: skip
            lines.append(found)
    return lines


@asynccontextmanager
async def _beside(client: Client, seen: Seen, judging: bool) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(client.judge(seen)), asyncio.create_task(client.new_chats(seen))] if judging else []
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


# Adapters -------------------------------------------------------------------------------------------------------------

ADAPTER_RANK, AT_ONCE = 16, (1, 4, 16)
PLUGINS = {"without the plugin": "", "with it": "clawloop"}


async def adapters_measured(url: str, base: str, adapter: Path, tokens: int) -> list[dict[str, Any]]:
    """Tokens/s of the base model and of the adapter, by the number of streams."""
    way = Way("adapters", (), place_in_queue, seeded=False)
    timeout = aiohttp.ClientTimeout(total=None)
    lines: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(timeout=timeout) as session:
        loaded = {"lora_name": adapter.name, "lora_path": str(adapter)}
        async with session.post(f"{url}/v1/load_lora_adapter", json=loaded) as answer:
            answer.raise_for_status()
        for model in (base, adapter.name):
            client = Client(session, url, model, way)
            await client.stream(Seen(), 8)
            for streams in AT_ONCE:
                seen, began = Seen(), time.monotonic()
                await asyncio.gather(*(client.stream(seen, tokens) for _ in range(streams)))
                speed = seen.tokens / (time.monotonic() - began)
                lines.append({"adapted": model != base, "streams": streams, "tokens_per_s": speed})
    return lines


def compare_adapters(options: argparse.Namespace) -> None:
    """Print tokens/s by number of streams, and how much faster the plugin makes an adapter."""
    table = Table("engine", "answered by", *(f"{streams} streams, tokens/s" for streams in AT_ONCE))
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        lora = LoraShape(ADAPTER_RANK, 2.0 * ADAPTER_RANK)
        [version] = random_versions(options.model, Path(scratch) / "adapters", [1], lora)
        adapter = Path(scratch) / "adapters" / version.path
        for name, plugins in PLUGINS.items():
            load = load_now()
            planned = engine_options(options.model, free_port(), max_model_len=CONTEXT)
            environment = {**planned.environment, "VLLM_PLUGINS": plugins}
            engine = replace(planned, further=_CACHE, environment=environment)
            with running_engine(options.model, engine, Path(scratch) / f"{plugins}.log") as url:
                base = options.model.resolve().name
                lines = asyncio.run(adapters_measured(url, base, adapter, options.tokens))
            with options.out.open("a", encoding="utf-8") as file:
                for line in lines:
                    text = {"model": options.model.name, "load_before": load, "way": name, **line}
                    file.write(f"{json.dumps(text)}\n")
            for adapted in (False, True):
                found = [line["tokens_per_s"] for line in lines if line["adapted"] is adapted]
                table.add_row(name, "adapter" if adapted else "base model", *(f"{speed:.1f}" for speed in found))
                if adapted:
                    speeds[name] = found
    console = Console(width=140)
    console.print(table)
    before, now = speeds.values()
    ratios = ", ".join(f"{after / first:.2f}" for first, after in zip(before, now, strict=True))
    console.print(f"an adapter's tokens/s with the plugin to without: {ratios}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks streams", description="streams while a judge's prompts are read")
    parser.add_argument("model", type=Path, help="folder of the model: clawloop model fetch smollm2 prints it")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--adapter", action="store_true", help="compare an adapter's speed without and with the plugin")
    options = parser.parse_args()
    if options.adapter:
        compare_adapters(options)
        return
    table = Table("engine", "beside", *COLUMNS.values())
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            load = load_now()
            planned = engine_options(options.model, free_port(), max_model_len=CONTEXT)
            engine = replace(planned, further=(*_CACHE, *way.further))
            with running_engine(options.model, engine, Path(folder) / "vllm.log") as url:
                for line in asyncio.run(measured(url, options.model.resolve().name, way, options.tokens)):
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(f"{json.dumps({'model': options.model.name, 'load_before': load, **line})}\n")
                    cells = ["" if line[name] is None else f"{line[name]:.2f}" for name in COLUMNS]
                    table.add_row(line["way"], line["beside"], *cells)
                    if line["beside"] == "a judge":
                        found[way.name] = line["longest_gap_s"]
    before, now = found.values()
    console = Console(width=140)
    console.print(table)
    console.print(f"longest gap beside a judge, now to before: {now / before:.2f}", highlight=False)


if __name__ == "__main__":
    main()
