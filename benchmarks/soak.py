"""Memory of each part over 10,000 turns, half of them in one session, in the whole system without faults.

The system is that of `make chaos`: as under `clawloop up`, with an engine that has no model, so that turns are quick;
with `--engine vllm` it is vLLM, and measured too. A part's memory is that of its processes and of all below them, thus
of PostgreSQL's backends, too. Of each process it is the anonymous memory, pages that several share divided among them
(`Pss_Anon`): what a program allocates, without files and without PostgreSQL's shared buffers, whose size is fixed and
which would grow until all are used. At the end each reply whose end a client saw is looked up, and `clawloop check`
must find nothing. Nor may a request fail, or a part restart: its memory would begin anew.

Memory is flat if the most of the second half is at most 1.05 times the most of the quarter before it. Of three samples
that follow each other the middle one counts, so a peak of one sample is no growth, and as the most counts, neither is
it undone by a fall at the end. A steady growth of 11 % or more over the run fails; what is less, `MB a 1,000 turns`
shows: the median of the slopes between any two samples of the second half. More turns find a smaller growth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.report import Figure, Ratio, Result
from clawloop.app.local.supervision.supervisor import PartState, PartStatus
from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.chaos.chatters import Chatters
from tests.chaos.stack import Stack, family, running_stack
from tests.chaos.stand_in_engine import stand_in_engine
from tests.chaos.verify import Verifier

PARTS = ("gateway", "combined-worker", "trainer", "temporal", "postgres")
SAMPLES = 40
# Allocators and caches move by a few per cent either way.
FLAT = 1.05
LONG_SESSION = 1000  # the number of the session that has half of the turns

Memory = dict[str, list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the pauses and verdicts")
    parser.add_argument("--engine", choices=["stand-in", "vllm"], default="stand-in", help="vllm: the tiny model")
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
    parts = PARTS if options.engine == "stand-in" else (*PARTS, "vllm")
    # Of the default of 256 MiB these turns would fill a part, and the memory of each process would grow to the end.
    os.environ["CLAWLOOP_CONVERSATION_CACHE_MIB"] = str(options.cache_mib)
    memory: Memory = defaultdict(list)
    at: list[float] = []
    async with AsyncExitStack() as running:
        port = None
        if options.engine == "stand-in":
            engine = await running.enter_async_context(stand_in_engine(model.name, options.seed))
            port = urlsplit(engine.url).port
        stack = await running.enter_async_context(running_stack(folder, model, port))
        of_the_start = len(stack.statuses)
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
                _sample(stack, parts, memory)
                print(f"{time.strftime('%H:%M:%S')} {seen} turns", flush=True)
            if many.stop and one.stop:
                break
            await asyncio.sleep(0.2)
        await asyncio.gather(many.end(), one.end())
        seconds = time.monotonic() - began
        at.append(float(len(many.seen) + len(one.seen)))
        _sample(stack, parts, memory)
        verifier = Verifier(stack)
        problems = await verifier.problems([*many.seen, *one.seen])
        steps = await verifier.committed_steps()
        await verifier.close()
        restarts = restarts_of(stack.statuses[of_the_start:])
    failures = many.take_failures() + one.take_failures()
    printed = [f"{seconds:.0f} s, {steps} steps, {len(one.seen)} turns in the long session"]
    printed += [f"PROBLEM {problem}" for problem in problems] + [f"RESTARTED {restart}" for restart in restarts]
    printed += [f"FAILED {count} requests: {why}" for why, count in failures.most_common()]
    print("\n".join(printed), flush=True)
    rows = [_row(part, at, memory[part]) for part in parts]
    ratios = {f"{part}: most memory of the second half, to the quarter before": growth(memory[part]) for part in parts}
    raw = {"turns": at, **memory}
    ratios |= faults(problems, failures, restarts)
    # The trainer's memory is flat if it does nothing.
    ratios["training steps"] = Ratio(float(steps), "higher", 1.0)
    return Result(rows, ratios, raw, printed)


def faults(problems: Sequence[str], failures: Counter[str], restarts: Sequence[str]) -> dict[str, Ratio]:
    """Counts that are 0 in a run without faults."""
    found = {
        "turns lost, or damage found": len(problems),
        "requests failed": failures.total(),
        "parts restarted": len(restarts),
    }
    return {what: Ratio(float(count), "lower", 0.0) for what, count in found.items()}


def restarts_of(statuses: Sequence[PartStatus]) -> list[str]:
    """The part that ended each time, and the reason."""
    return [f"{status.name}: {status.detail}" for status in statuses if status.state is PartState.WAITING]


def _sample(stack: Stack, parts: Sequence[str], memory: Memory) -> None:
    for part in parts:
        processes = {one.pid for process in stack.processes(part) for one in family(process)}
        memory[part].append(sum(map(allocated_mb, processes)))


def allocated_mb(pid: int) -> float:
    """Anonymous memory, of what several processes share a part; none if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):  # a backend of PostgreSQL that has just ended
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss_Anon:"))


def _row(part: str, turns: list[float], values: list[float]) -> dict[str, Figure]:
    before, after = _most(values)
    return {
        "part": part,
        "at first MB": values[0],
        "most of the quarter before half-time MB": before,
        "most of the second half MB": after,
        "at last MB": values[-1],
        "MB a 1,000 turns": _slope(turns, values) * 1000,
    }


def growth(values: list[float]) -> Ratio:
    before, after = _most(values)
    return Ratio(after / before, "lower", FLAT)


def _most(values: list[float]) -> tuple[float, float]:
    """The most of the quarter before half-time, and of the second half, without peaks of one sample."""
    smooth = [statistics.median(values[max(0, at - 1) : at + 2]) for at in range(len(values))]
    quarter, half = len(smooth) // 4, len(smooth) // 2
    return max(smooth[quarter:half]), max(smooth[half:])


def _slope(turns: list[float], values: list[float]) -> float:
    """MB a turn in the second half: the median of the slopes between any two samples."""
    points = list(zip(turns, values, strict=True))[len(values) // 2 :]
    pairs = itertools.combinations(points, 2)
    return statistics.median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs if later[0] > one[0])
