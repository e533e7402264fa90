"""How long a vote takes while chats fill the engine that both ask: with and without the bound on chats and priorities.

Clients stream from vLLM on the random tiny model, by the gateway's own way to an engine; one judge asks vote after
vote, three answers each. The states alternate within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.load import percentile
from benchmarks.processes import free_port
from benchmarks.report import Figure, Ratio, Result
from clawloop.layout.engine import chats_of_gateway
from clawloop.local.tiny_model import ensure_tiny_model
from tests.e2e.conftest import running_engine
from tests.e2e.shared_engine import SEQS, Chats, vote
from tests.engine_options import engine_options

# State → places of chats, and whether judges precede them; None: no chats.
STATES: dict[str, tuple[int | None, bool] | None] = {
    "no chats": None,
    "neither": (None, False),
    "priority": (None, True),
    "bound": (chats_of_gateway(SEQS, 1), False),
    "bound and priority": (chats_of_gateway(SEQS, 1), True),
}
SHORTEST, LONGEST = 50, 400
"""Tokens of a reply, evenly spread."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the chats' lengths")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; 1 with --quick")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each state in a round")


def run(options: argparse.Namespace) -> Result:
    rounds = options.rounds or (1 if options.quick else 3)
    taken: dict[str, list[float]] = {state: [] for state in STATES}
    replies = dict.fromkeys(STATES, 0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        with running_engine(model, engine_options(model, free_port()), folder / "vllm.log") as url:
            for number in range(rounds):
                for state in STATES:
                    seed = options.seed * 1000 + number
                    seconds, ended = asyncio.run(_measure(url, state, options.clients, options.seconds, seed))
                    taken[state] += seconds
                    replies[state] += ended
    rows: list[dict[str, Figure]] = [
        {
            "chats": state,
            "votes": len(seconds),
            "vote p50 s": median(seconds),
            "vote p95 s": percentile(seconds, 0.95),
            "vote max s": max(seconds),
            "replies/s": replies[state] / (rounds * options.seconds),
        }
        for state, seconds in taken.items()
    ]
    before = median(taken["neither"])
    ratios = {
        f"median vote, {state} to neither": Ratio(median(seconds) / before, "lower")
        for state, seconds in taken.items()
        if state not in ("no chats", "neither")
    }
    return Result(rows, ratios, taken)


async def _measure(url: str, state: str, clients: int, seconds: float, seed: int) -> tuple[list[float], int]:
    """How long each vote took, and how many replies ended meanwhile."""
    how, lengths = STATES[state], random.Random(seed)
    places, first = (None, False) if how is None else how
    chats = Chats(url, places)

    async def keep_chatting(key: int) -> None:
        while True:
            await chats.chat(key, lengths.randint(SHORTEST, LONGEST))

    taken: list[float] = []
    async with chats.engines:
        talking = [asyncio.create_task(keep_chatting(key)) for key in range(clients if how else 0)]
        if talking:
            await chats.begun(min(places or SEQS, clients))
        began, before = time.monotonic(), len(chats.ended)
        while time.monotonic() < began + seconds:
            asked = time.monotonic()
            taken.append(await vote(url, with_chats=first) - asked)
        ended = sum(moment < began + seconds for moment in chats.ended) - before
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
    return taken, ended
