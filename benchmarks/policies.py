"""Twenty people with a policy each: on one engine, with a slot for each adapter and with few, and at one trainer.

Chats: vLLM on the random tiny model behind a gateway for each of two engines; all people chat at once, each with one
request after the other. Beside them as many clients of a single policy. The three cases alternate within one run.
Steps: Temporal's development server and the training workflows; ledger and trainer are scripted, as the order in which
a trainer takes steps is decided by neither. One person has many batches, all others have one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks import contenders
from benchmarks.load import Load, percentile, prompt, stream
from benchmarks.processes import free_port, running_temporal
from benchmarks.report import Figure, Ratio, Result
from clawloop.local.services.postgres import running_postgres
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.processes.bootstrap import prepare
from clawloop.temporal.plugin import connect
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.conftest import started_engine
from tests.e2e.many_policies import add_people
from tests.engine_options import engine_options
from tests.workflows.learning import Learner
from tests.workflows.shared_trainer import Turn, all_queued, shared_trainer

ONE, ALL, FEW = "one policy", "a slot for each", "few slots"
PROMPT_TOKENS, REPLY_TOKENS = 64, 16
BATCHES = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--slots", type=int, default=4, help="of the engine with few")
    parser.add_argument("--rounds", type=int, default=None, help="default: 4; 1 with --quick")
    parser.add_argument(
        "--requests", type=int, default=None, help="of each person in a round; default: 6; 2 with --quick"
    )
    parser.add_argument("--step-seconds", type=float, default=0.5, help="that each step takes")


@dataclass(frozen=True)
class Case:
    """
    Args:
        keys: one for each client.
    """

    url: str
    keys: Sequence[str]


def run(options: argparse.Namespace) -> Result:
    rounds, requests = options.rounds or (1 if options.quick else 4), options.requests or (2 if options.quick else 6)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        loads = _chats(folder, stack, options.people, options.slots, rounds, requests)
    with tempfile.TemporaryDirectory() as scratch, running_temporal(Path(scratch)) as temporal:
        turns = asyncio.run(_steps(temporal, options.people, options.step_seconds))
    failures = [failure for load in loads.values() for failure in load.failures]
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed: {failures[0]}")
    busy = turns[0].policy
    firsts = [turn for turn in turns if turn.n == 1 and turn.policy != busy]
    steps_before = [sum(turn.policy == busy for turn in turns[: turns.index(first)]) for first in firsts]
    waits = {
        "first steps of the others": [turn.began_at - turn.claimed_at for turn in firsts],
        "further steps of the busy one": [turn.began_at - turn.claimed_at for turn in turns if turn.n > 1],
    }
    ratios = {
        f"requests/s, {case} to {ONE}": Ratio(loads[case].per_second / loads[ONE].per_second, "higher")
        for case in (ALL, FEW)
    }
    ratios |= {
        f"first token p50, {case} to {ONE}": Ratio(
            median(loads[case].first_seconds) / median(loads[ONE].first_seconds), "lower"
        )
        for case in (ALL, FEW)
    }
    ratios["failed requests"] = Ratio(0.0, "lower", 0.0)
    ratios["steps of the busy policy before another's first, at most"] = Ratio(float(max(steps_before)), "lower", 1.0)
    raw = {f"first token s, {case}": load.first_seconds for case, load in loads.items()}
    raw |= {f"wait s, {who}": seconds for who, seconds in waits.items()}
    rows = [_row(case, load) for case, load in loads.items()]
    return Result([*rows, *(_waiting(who, seconds) for who, seconds in waits.items())], ratios, raw)


def _chats(folder: Path, stack: ExitStack, people: int, slots: int, rounds: int, requests: int) -> dict[str, Load]:
    model = ensure_tiny_model(folder / "models")
    postgres = stack.enter_context(running_postgres(folder / "postgres"))
    cases: dict[str, Case] = {}
    engines = {
        case: stack.enter_context(
            started_engine(
                model,
                engine_options(model, free_port(), policies=people, max_loras=max_loras),
                folder / f"vllm-{max_loras}.log",
            )
        )
        for case, max_loras in ((ALL, people), (FEW, slots))
    }
    for number, (case, engine) in enumerate(engines.items()):
        execute(postgres.url, f"CREATE DATABASE people{number}")
        database = database_address(postgres.url, f"people{number}")
        migrate(database)
        url, data = engine.ready(), folder / f"data{number}"
        asyncio.run(prepare(database, model.name, [], [url], {}))
        found = asyncio.run(add_people(database, url, model, data / "adapters", people))
        keys = [person.key for person in found]
        gateway = stack.enter_context(contenders.gateway(case, data, database, keys[0], None, 1))
        cases[case] = Case(gateway.url, keys)
        if case == ALL:
            cases[ONE] = Case(gateway.url, keys[:1] * people)
    loads = {case: Load() for case in (ONE, ALL, FEW)}
    warming = Load()
    for one in cases.values():
        asyncio.run(_round(one, 1, 0, warming))
    for turn in range(rounds):
        first = turn % len(loads)  # no case always follows the same one
        for name in (*list(loads)[first:], *list(loads)[:first]):
            asyncio.run(_round(cases[name], requests, 1 + turn * requests, loads[name]))
    loads[ONE].failures += warming.failures
    return loads


async def _round(case: Case, requests: int, first: int, load: Load) -> None:
    """Each client sends this many requests, one after the other."""
    loop = asyncio.get_running_loop()

    async def chat(place: int, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=600)) as client:
            for n in range(first, first + requests):
                body: dict[str, object] = {
                    "model": "policy",
                    "stream": True,
                    "max_tokens": REPLY_TOKENS,
                    "ignore_eos": True,
                    "messages": [{"role": "user", "content": prompt(PROMPT_TOKENS, 1000 * place + n)}],
                }
                await stream(client, case.url, body, f"person-{place}-{n}", load)

    began = loop.time()
    await asyncio.gather(*(chat(place, key) for place, key in enumerate(case.keys)))
    load.wall_seconds += loop.time() - began


async def _steps(temporal: str, people: int, step_seconds: float) -> list[Turn]:
    """The steps in the order in which one trainer took them: the busy policy's first, while all others get a batch."""
    async with shared_trainer(await connect(temporal), step_seconds) as trainer:
        client = await connect(temporal)
        busy = Learner(client, trainer.add())
        busy.scripted.gate.clear()
        await busy.samples(BATCHES * busy.scripted.needed)
        others = [Learner(client, trainer.add()) for _ in range(people - 1)]
        await all_queued([busy])
        for learner in others:
            await learner.samples(learner.scripted.needed)
        await all_queued(others)
        busy.scripted.gate.set()
        async with asyncio.timeout(60 + 10 * step_seconds * (people + BATCHES)):
            while len(trainer.turns) < people - 1 + BATCHES:  # noqa: ASYNC110 - Temporal tells nobody
                await asyncio.sleep(0.05)
        return list(trainer.turns)


def _row(case: str, load: Load) -> dict[str, Figure]:
    return {
        "case": case,
        "answered": len(load.whole_seconds),
        "failed": len(load.failures),
        "requests/s": load.per_second,
        "p50 ms": median(load.first_seconds) * 1000,
        "p99 ms": percentile(load.first_seconds, 0.99) * 1000,
        "max ms": max(load.first_seconds) * 1000,
    }


def _waiting(who: str, seconds: list[float]) -> dict[str, Figure]:
    return {
        "case": f"steps: {who}",
        "answered": len(seconds),
        "failed": 0,
        "requests/s": None,
        "p50 ms": median(seconds) * 1000,
        "p99 ms": percentile(seconds, 0.99) * 1000,
        "max ms": max(seconds) * 1000,
    }
