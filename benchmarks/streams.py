"""How long eight streams stand still, and a new chat waits to begin, while judges are asked on the same CPU engine.

The engine is started as `clawloop up` starts it, and has eight streams and a new chat every other second: first alone,
then beside votes that a judge worker's own client asks for, as many questions at a time as it has under way. Run as
`make bench ARGS="streams FOLDER"`; `--questions 1,8` tries fewer at a time beside it.

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
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.options import sizes
from benchmarks.processes import free_port
from benchmarks.report import load_now
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.ids import TurnId
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt, vote_prompt
from clawloop.core.recipes.recipe import Signal
from clawloop.serving.endpoints import Endpoint, connector, place_in_queue
from clawloop.serving.judge import MAX_CONCURRENT, JudgeClient
from clawloop.training.model.port import LoraShape
from tests.e2e.adapters import random_versions
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options
from tests.unit.judging.conversations import evidence

OUT = Path(__file__).parent / "results" / "streams.jsonl"
STREAMS, CHAT_TOKENS = 8, 60
# Nearly every vocabulary has each as one token: with instruction and tags a question has some 1,900.
WORDS = ("the", "file", "notes", "apples", "meeting", "seven", "write", "please", "report", "draft", "server", "garden")
QUESTION_WORDS = 1700
SIGNAL = Signal()
CONTEXT = 4096
NEW_CHAT_SECONDS = 2.0
_CACHE = ("--kv-cache-memory-bytes", str(2**30))
COLUMNS = {
    "longest_gap_s": "longest gap s",
    "median_gap_s": "median gap s",
    "tokens_per_s": "tokens/s",
    "first_token_s": "first token s, at most",
    "median_first_token_s": "median first token s",
    "answer_s": "judge's answer s",
}
COMPARED = ("longest_gap_s", "first_token_s", "median_first_token_s")


@dataclass
class Seen:
    """Times of tokens.

    Args:
        gaps: seconds between two tokens of a stream.
        first: seconds until the first token of a new chat.
        judged: seconds until a question had all its votes.
        unanswered: questions that the judge's client gave up.
    """

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    unanswered: int = 0
    tokens: int = 0


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, f"{url}/v1/completions", model
        self._random = random.Random(7)

    def prompt(self) -> list[int]:
        """Tokens that no earlier prompt begins with, so that no cache has them."""
        return [self._random.randrange(300, 5000) for _ in range(CHAT_TOKENS)]

    def question(self) -> JudgePrompt:
        """One that has nothing but the instruction in common with earlier ones."""
        request, reply, answer = (" ".join(self._random.choices(WORDS, k=QUESTION_WORDS // 3)) for _ in range(3))
        turn = TurnId(UUID(int=self._random.getrandbits(128)))
        return vote_prompt(turn, evidence(request, reply, answer), AnswerForm.GRAMMAR)

    async def stream(self, seen: Seen, tokens: int, *, is_new: bool = False) -> None:
        body = {"model": self._model, "prompt": self.prompt(), "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0.6, "stream": True, **place_in_queue()}
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

    async def new_chats(self, seen: Seen, chats: asyncio.TaskGroup) -> None:
        """Begin one after the other, whether the last one has its token or not, until cancelled."""
        while True:
            await asyncio.sleep(NEW_CHAT_SECONDS)
            chats.create_task(self.stream(seen, 1, is_new=True))

    async def judge(self, seen: Seen, judge: JudgeClient) -> None:
        """Questions, one after another, until cancelled."""
        await asyncio.sleep(NEW_CHAT_SECONDS)  # the streams have begun
        while True:
            sent = time.monotonic()
            try:
                await judge.answers("default", self.question(), SIGNAL.m, SIGNAL.judge_temperature)
            except JudgeUnavailable:
                seen.unanswered += 1
            else:
                seen.judged.append(time.monotonic() - sent)


async def measured(url: str, model: str, tokens: int, questions: Sequence[int]) -> AsyncIterator[dict[str, Any]]:
    """Figures of streams and new chats alone, and beside so many questions at a time."""
    here = [Endpoint(url, model)]
    async with (
        aiohttp.ClientSession(connector=connector(), timeout=aiohttp.ClientTimeout(total=None)) as session,
        JudgeClient(lambda policy: here, AnswerForm.GRAMMAR, with_chats=True) as judge,
    ):
        client = Client(session, url, model)
        await client.stream(Seen(), 8)
        for at_once in (0, *questions):
            seen, began = Seen(), time.monotonic()
            # Judges are asked until each chat that has begun has its token.
            async with _meanwhile(*(client.judge(seen, judge) for _ in range(at_once))), asyncio.TaskGroup() as chats:
                async with _meanwhile(client.new_chats(seen, chats)):
                    await asyncio.gather(*(client.stream(seen, tokens) for _ in range(STREAMS)))
                seconds = time.monotonic() - began
            yield {
                "questions": at_once, "votes": SIGNAL.m, "longest_gap_s": max(seen.gaps),
                "median_gap_s": median(seen.gaps), "tokens_per_s": seen.tokens / seconds,
                "first_token_s": max(seen.first, default=None),
                "median_first_token_s": median(seen.first) if seen.first else None, "begun": len(seen.first),
                "judged": len(seen.judged), "answer_s": median(seen.judged) if seen.judged else None,
                "unanswered": seen.unanswered,
            }  # fmt: skip


@asynccontextmanager
async def _meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def compare_judging(options: argparse.Namespace, url: str, load: float) -> None:
    """Print the figures, and how much larger those beside judging are."""
    console = Console(width=140)
    table = Table("questions at once", *COLUMNS.values(), "answered", "given up")
    alone: dict[str, Any] = {}
    ratios = []
    async for line in measured(url, options.model.resolve().name, options.tokens, options.questions):
        with options.out.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps({'model': options.model.name, 'load_before': load, **line})}\n")
        cells = ["" if line[name] is None else f"{line[name]:.2f}" for name in COLUMNS]
        table.add_row(str(line["questions"]), *cells, str(line["judged"]), str(line["unanswered"]))
        alone = alone or line
        if line is not alone:
            known = [name for name in COMPARED if line[name] and alone[name]]
            found = ", ".join(f"{COLUMNS[name]} {line[name] / alone[name]:.2f}" for name in known)
            ratios.append(f"beside {line['questions']} questions, to alone: {found}")
    console.print(table)
    console.print("\n".join(ratios), highlight=False)


# Adapters -------------------------------------------------------------------------------------------------------------

ADAPTER_RANK, AT_ONCE = 16, (1, 4, 16)
PLUGINS = {"without the plugin": "", "with it": "clawloop"}


async def adapters_measured(url: str, base: str, adapter: Path, tokens: int) -> list[dict[str, Any]]:
    """Tokens/s of the base model and of the adapter, by the number of streams."""
    timeout = aiohttp.ClientTimeout(total=None)
    lines: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(connector=connector(), timeout=timeout) as session:
        loaded = {"lora_name": adapter.name, "lora_path": str(adapter)}
        async with session.post(f"{url}/v1/load_lora_adapter", json=loaded) as answer:
            answer.raise_for_status()
        for model in (base, adapter.name):
            client = Client(session, url, model)
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
    parser = argparse.ArgumentParser(prog="benchmarks streams", description="streams and chats while judges are asked")
    parser.add_argument("model", type=Path, help="folder of the model: clawloop model fetch smollm2 prints it")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--questions", type=sizes, default=[MAX_CONCURRENT], help="to judges at a time: 8, or 1,8")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--adapter", action="store_true", help="compare an adapter's speed without and with the plugin")
    options = parser.parse_args()
    if options.adapter:
        compare_adapters(options)
        return
    load = load_now()
    engine = replace(engine_options(options.model, free_port(), max_model_len=CONTEXT), further=_CACHE)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_engine(options.model, engine, Path(folder) / "vllm.log") as url,
    ):
        asyncio.run(compare_judging(options, url, load))


if __name__ == "__main__":
    main()
