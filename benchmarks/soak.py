"""Memory of every process over 10,000 turns, half of them in one session, in the whole system without faults.

The system is that of `make chaos`: as under `clawloop up`, with an engine that has no model, so that turns are quick.
The memory of a process is what it alone has: not what it shares, such as PostgreSQL's buffers. At the end each reply
whose end a client saw is looked up, and `clawloop check` must find nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.report import Figure, Ratio, Result
from clawloop.local.tiny_model import ensure_tiny_model
from tests.chaos.chatters import Chatters
from tests.chaos.stack import Stack, running_stack
from tests.chaos.stand_in_engine import stand_in_engine
from tests.chaos.verify import Verifier

PARTS = ("gateway", "orchestrator", "judge", "trainer", "engine-agent", "temporal", "postgres")
SAMPLES = 40
# Of the last half's end, beside its beginning: allocators and caches move by a few per cent either way.
FLAT = 1.05
LONG_SESSION = 1000  # the number of the session that has half of the turns

Memory = dict[str, list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=None, help="in all; default: 10000; 400 with --quick")
    parser.add_argument("--sessions", type=int, default=16, help="that share the other half")
    parser.add_argument("--cache-mib", type=float, default=4.0, help="conversations kept, full before half-time")
    parser.add_argument("--pace", type=float, default=16.0, help="turns a second, at most")


def run(options: argparse.Namespace) -> Result:
    turns = options.turns or (400 if options.quick else 10_000)
    with tempfile.TemporaryDirectory(prefix="clawloop-soak-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's service user enters it
        return asyncio.run(_soak(folder, turns, options))


async def _soak(folder: Path, turns: int, options: argparse.Namespace) -> Result:
    model = ensure_tiny_model(folder / "models")
    # Of the default of 256 MiB these turns would fill a part, and the memory of each process would grow to the end.
    os.environ["CLAWLOOP_CONVERSATION_CACHE_MIB"] = str(options.cache_mib)
    memory: Memory = defaultdict(list)
    at: list[float] = []
    async with AsyncExitStack() as running:
        engine = await running.enter_async_context(stand_in_engine(model.name, options.seed))
        stack = await running.enter_async_context(running_stack(folder, model, urlsplit(engine.url).port))
        key, url = stack.keys["chat"], stack.gateway_url
        half = options.pace / 2
        many = Chatters(url, key, options.sessions / half)
        one = Chatters(url, key, 1 / half)
        many.start(options.sessions, options.seed)
        one.start(1, options.seed, first=LONG_SESSION)
        began = time.monotonic()
        while (seen := len(many.seen) + len(one.seen)) < turns:
            for chatters, share in ((many, turns // 2), (one, turns - turns // 2)):
                chatters.raise_if_ended()
                if len(chatters.seen) >= share:
                    chatters.stop = True
            if seen >= turns * len(at) / SAMPLES:
                at.append(float(seen))
                _sample(stack, memory)
                print(f"{time.strftime('%H:%M:%S')} {seen} turns", flush=True)
            if many.stop and one.stop:
                break
            await asyncio.sleep(0.2)
        await asyncio.gather(many.end(), one.end())
        seconds = time.monotonic() - began
        at.append(float(len(many.seen) + len(one.seen)))
        _sample(stack, memory)
        verifier = Verifier(stack)
        problems = await verifier.problems([*many.seen, *one.seen])
        steps = await verifier.committed_steps()
        await verifier.close()
    print(f"{seconds:.0f} s, {steps} steps, {len(one.seen)} turns in the long session", flush=True)
    for problem in problems:
        print(f"PROBLEM {problem}", flush=True)
    rows = [_row(part, memory[part]) for part in PARTS]
    ratios = {
        f"{row['part']}: memory of the last tenth, to half-time": _growth(memory[str(row["part"])]) for row in rows
    }
    found = {"turns lost, or damage found": Ratio(float(len(problems)), "lower", 0.0)}
    raw = {"turns": at, **memory}
    return Result(rows, ratios | found, raw, [f"{seconds:.0f} s, {steps} steps, {len(one.seen)} turns in one session"])


def _sample(stack: Stack, memory: Memory) -> None:
    for part in PARTS:
        total = 0.0
        for process in stack.processes(part):
            try:
                total += process.memory_full_info().uss / 2**20
            except psutil.NoSuchProcess:  # a backend of PostgreSQL that has just ended
                continue
        memory[part].append(total)


def _row(part: str, values: list[float]) -> dict[str, Figure]:
    tenth = max(1, len(values) // 10)
    return {
        "part": part,
        "at first MB": values[0],
        "at half-time MB": _half_time(values),
        "at last MB": statistics.median(values[-tenth:]),
        "most MB": max(values),
    }


def _growth(values: list[float]) -> Ratio:
    tenth = max(1, len(values) // 10)
    return Ratio(statistics.median(values[-tenth:]) / _half_time(values), "lower", FLAT)


def _half_time(values: list[float]) -> float:
    tenth, middle = max(1, len(values) // 10), len(values) // 2
    return statistics.median(values[middle : middle + tenth])
