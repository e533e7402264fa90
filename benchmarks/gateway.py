"""Chats through our gateway, recording, beside a direct client, aiohttp relays and LiteLLM proxy.

All are measured in turn within one run, so that a busy machine slows all of them. A *case* is a number of streams, a
prompt length and a pace: at 0 ms a token the servers are saturated, at 20 ms they keep pace or do not. At a pace the
streams begin one by one over the length of an answer, as those of different people do; with `--together` all at once.

Each stream has conversations of four turns: question, the server's own answer, the next question. Its client names no
session, so recording has most to do: it looks up by what was said which conversation goes on, and stores what is new.
That is what goals are measured with; `--turns 1` and `--sessions named` (as OpenClaw does) leave parts of it out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import psycopg
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import contenders
from benchmarks.contenders import Contender
from benchmarks.load import Chats, Load, closed_loop, percentile
from benchmarks.options import at_least, sizes
from benchmarks.processes import LOOPBACK, answers, cpu_seconds, free_port, module, running, running_temporal, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.app.processes.bootstrap import prepare
from clawloop.core.errors import SetupError
from tests.engine_options import engine_options

RECORDING = "clawloop"
NOTIFYING = "clawloop, notifying"
PARSING = "aiohttp relay, parsing"
DIRECT = "direct"
LITELLM = "LiteLLM proxy"
# An answer keeps pace that takes at most this much longer than its tokens at their pace.
PACE_SLACK = 1.1
# Temporal's development server takes some 200 signals a second, and no turn has more requests than some hundreds.
BACKLOG_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    streams: int
    prompt_tokens: int
    milliseconds: int

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.prompt_tokens // 1000}k prompt, {self.milliseconds} ms"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=["stub", "vllm"], default="stub", help="vllm: the tiny random model")
    streams = "default: 1,16,64,256; 1,16,64 with --quick, of which 64 at a pace; 1,16 with vllm"
    parser.add_argument("--streams", type=sizes, default=None, help=streams)
    prompts = "mean tokens of a request; default: 1000,32000; 1000 with --quick or vllm"
    parser.add_argument("--prompts", type=sizes, default=None, help=prompts)
    parser.add_argument("--paces", default=None, help="ms a token; default: 0,20; 0 with vllm")
    parser.add_argument("--turns", type=at_least(1), default=4, help="of a conversation")
    parser.add_argument("--sessions", choices=["unnamed", "named"], default="unnamed", help="named: in a header")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each server in a case; default: 3")
    parser.add_argument("--processes", type=int, default=1, help="gateways on one socket")
    parser.add_argument("--without-litellm", action="store_true")
    parser.add_argument("--together", action="store_true", help="streams at a pace begin at once, not one by one")


def run(options: argparse.Namespace) -> Result:
    cases = _cases(options)
    for prompt_tokens in {case.prompt_tokens for case in cases}:
        if (first := _chats(Case(1, prompt_tokens, 0), 1, options).tokens(0)) < _growth(options):
            raise SetupError(
                f"--prompts {prompt_tokens}: {first} tokens are left for the first of {options.turns} turns"
            )
    rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        engine, model = stack.enter_context(_engine(options, folder))
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        key = asyncio.run(prepare(postgres.url, model, [], [engine], {}))["chat"]
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        servers = [Contender(DIRECT, engine, model, "x", None)]
        servers += [stack.enter_context(contenders.relay(engine, model, how, folder)) for how in ("raw", "parsing")]
        if not options.without_litellm:
            servers.append(stack.enter_context(contenders.litellm(engine, model, folder)))
        for name, address in ((RECORDING, None), (NOTIFYING, temporal)):
            ours = contenders.gateway(name, folder / name, postgres.url, key, address, options.processes)
            servers.append(stack.enter_context(ours))
        measured = asyncio.run(_measure(cases, servers, engine, postgres.url, rounds, options))
        places = asyncio.run(_places([server for server in servers if server.name in (RECORDING, NOTIFYING)]))
        continued = f"{asyncio.run(_continued(postgres.url)):.2f} of the recorded turns continue another"
    print(continued, flush=True)
    tokens = options.tokens
    rows = [
        _row(case, name, load, loads[DIRECT], tokens)
        for case, loads in measured.items()
        for name, load in loads.items()
    ]
    raw = {f"{case}: {name}": load.whole_seconds for case, loads in measured.items() for name, load in loads.items()}
    ratios = {name: ratio for case, loads in measured.items() for name, ratio in _ratios(case, loads, tokens).items()}
    return Result(rows, ratios | places, raw, [continued])


def _cases(options: argparse.Namespace) -> list[Case]:
    small, real = options.quick, options.engine == "vllm"
    paces = [0] if real else [0, 20]
    if options.paces is not None:
        paces = [int(pace) for pace in options.paces.split(",")]
    return [
        Case(streams, prompt_tokens, milliseconds)
        for milliseconds in paces
        for prompt_tokens in options.prompts or ([1000] if small or real else [1000, 32_000])
        # At a pace each case takes seconds of every server, so a quick run has only that of the goals.
        for streams in options.streams
        or ([1, 16] if real else [64] if small and milliseconds else [1, 16, 64] if small else [1, 16, 64, 256])
    ]


@contextmanager
def _engine(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """URL and model name of the engine."""
    if options.engine == "vllm":
        from tests.e2e.conftest import running_engine

        model = ensure_tiny_model(folder / "models")
        with running_engine(model, engine_options(model, free_port()), folder / "vllm.log") as url:
            yield url, model.name
        return
    port = free_port()
    log = folder / "engine.log"
    with running(module("benchmarks.stub_engine", port, options.tokens, 0), log) as process:
        url = f"http://{LOOPBACK}:{port}"
        wait_for(f"{url}/health", process, log)
        yield url, "tiny"


async def _measure(
    cases: Sequence[Case],
    servers: Sequence[Contender],
    engine: str,
    database_url: str,
    rounds: int,
    options: argparse.Namespace,
) -> dict[Case, dict[str, Load]]:
    measured: dict[Case, dict[str, Load]] = {}
    number = 0
    limit = aiohttp.ClientTimeout(total=600)
    # A server that was not asked for 5 s closes its connections (the default of uvicorn, thus of the relays).
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as client:
        for case in cases:
            await answers(f"{engine}/set?milliseconds={case.milliseconds}")
            loads = measured[case] = {server.name: Load() for server in servers}
            for round_number in range(-1, rounds):  # the first one warms up, and opens the connections
                offset = round_number % len(servers)
                for server in (*servers[offset:], *servers[:offset]):
                    load = Load() if round_number < 0 else loads[server.name]
                    chats = _chats(case, 0 if round_number < 0 else _requests(case, server.name, options), options)
                    announced = await _announced(database_url) if server.name == NOTIFYING else None
                    await _one_turn(client, server, case, chats, number, load)
                    if announced is not None:
                        load.backlogs.append(await _drain(database_url, announced + chats.requests))
                    number += chats.requests
            print(f"{time.strftime('%H:%M:%S')} {case}", flush=True)
    return measured


def _requests(case: Case, server: str, options: argparse.Namespace) -> int:
    """Requests of one turn, at least: enough for seconds, also of the slowest server."""
    if case.milliseconds:
        return case.streams * (1 if options.quick else 3)
    wanted = max(case.streams * 2, 64 if options.quick else 256)
    return wanted // 4 if server == LITELLM or case.prompt_tokens > 8000 else wanted


def _chats(case: Case, requests: int, options: argparse.Namespace) -> Chats:
    """Chats of `requests` requests, at least one chat for each stream; 0: only each stream's first turn, to warm up."""
    turns = options.turns if requests else 1
    return Chats(
        streams=case.streams,
        # Whole ones, the same number for each stream: each turn of a conversation is measured as often.
        conversations=case.streams * max(1, -(-requests // (case.streams * turns))),
        turns=turns,
        prompt_tokens=case.prompt_tokens,
        growth_tokens=_growth(options),
        names_session=options.sessions == "named",
        spread_seconds=0.0 if options.together else case.milliseconds / 1000 * options.tokens,
        max_tokens=options.tokens if options.engine == "vllm" else None,
    )


def _growth(options: argparse.Namespace) -> int:
    """Tokens that a turn adds: an answer, which is a quarter longer as text of four bytes a token, and a question."""
    return 2 * int(options.tokens)


async def _one_turn(
    client: aiohttp.ClientSession, server: Contender, case: Case, chats: Chats, number: int, load: Load
) -> None:
    client.headers["Authorization"] = f"Bearer {server.key}"
    before = None if server.process is None else cpu_seconds(server.process)
    await closed_loop(client, server.url, server.model, chats, number, load)
    if server.process is not None and before is not None:
        load.cpu_seconds = (load.cpu_seconds or 0.0) + cpu_seconds(server.process) - before
    if load.failures:
        raise RuntimeError(f"{server.name}, {case}: {len(load.failures)} failed: {load.failures[0]}")


async def _drain(database_url: str, announced: int) -> tuple[int, float | None]:
    """Wait until so many turns are announced.

    Returns:
        How many were missing, and how long that took; None: some are left to the sweep, which does not run here.
    """
    began = time.monotonic()
    missing = left = announced - await _announced(database_url)
    while left > 0:
        if time.monotonic() > began + BACKLOG_SECONDS:
            return missing, None
        await asyncio.sleep(0.05)
        left = announced - await _announced(database_url)
    return missing, time.monotonic() - began


async def _continued(database_url: str) -> float:
    """The share of recorded turns that continue another: of conversations of four, about three quarters."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        counted = await connection.execute("SELECT count(parent_turn_id), count(*) FROM turns")
        row = await counted.fetchone()
    assert row is not None
    return float(row[0] / row[1])


async def _announced(database_url: str) -> int:
    """Turns that are announced to Temporal: of one server only, as the others announce none."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        counted = await connection.execute("SELECT count(*) FROM turns WHERE announced_at IS NOT NULL")
        row = await counted.fetchone()
    assert row is not None
    return int(row[0])


def _row(case: Case, name: str, load: Load, direct: Load, tokens: int) -> dict[str, Figure]:
    def added(share: float) -> float:
        return (percentile(load.whole_seconds, share) - percentile(direct.whole_seconds, share)) * 1000

    pace = case.milliseconds / 1000 * tokens * PACE_SLACK
    cpu = None if load.cpu_seconds is None else load.cpu_seconds / len(load.whole_seconds) * 1000
    drained = [seconds for _, seconds in load.backlogs if seconds is not None]
    return {
        "streams": case.streams,
        "prompt": case.prompt_tokens,
        "ms a token": case.milliseconds,
        "server": name,
        "requests/s": load.per_second,
        "CPU ms/request": cpu,
        "first byte p50 ms": median(load.first_seconds) * 1000,
        "added p50 ms": added(0.5),
        "added p99 ms": added(0.99),
        "keeps pace": sum(seconds <= pace for seconds in load.whole_seconds) / len(load.whole_seconds)
        if pace
        else None,
        "not announced at its end": median(missing for missing, _ in load.backlogs) if load.backlogs else None,
        "announced after s": median(drained) if drained and len(drained) == len(load.backlogs) else None,
    }


def _ratios(case: Case, loads: dict[str, Load], tokens: int) -> dict[str, Ratio]:
    found: dict[str, Ratio] = {}
    ours, relay = loads[RECORDING], loads[PARSING]
    at_goal = case.streams == 64 and case.prompt_tokens == 1000
    cpu = (ours.cpu_seconds or 0.0) / len(ours.whole_seconds)
    relay_cpu = (relay.cpu_seconds or 0.0) / len(relay.whole_seconds)
    found[f"{case}: CPU a request, to the parsing relay's"] = Ratio(cpu / relay_cpu, "lower", 2.0 if at_goal else None)
    if case.milliseconds == 0:
        for name in (RECORDING, NOTIFYING):
            ratio = loads[name].per_second / relay.per_second
            goal = 0.5 if at_goal and name == RECORDING else None
            found[f"{case}: requests/s of {name}, to the parsing relay's"] = Ratio(ratio, "higher", goal)
        if LITELLM in loads:
            ratio = ours.per_second / loads[LITELLM].per_second
            found[f"{case}: requests/s, to LiteLLM's"] = Ratio(ratio, "higher", 20.0 if at_goal else None)
    elif case.streams == 256:
        kept, relay_kept = (
            float(_row(case, name, load, loads[DIRECT], tokens)["keeps pace"] or 0.0)
            for name, load in ((RECORDING, ours), (PARSING, relay))
        )
        if relay_kept:
            ratio = kept / relay_kept
            found[f"{case}: streams that keep pace, to the parsing relay's"] = Ratio(ratio, "higher", 0.7)
    elif at_goal:
        row = _row(case, RECORDING, ours, loads[DIRECT], tokens)
        for share, goal in (("p50", 5.0), ("p99", 15.0)):
            found[f"{case}: added {share} ms"] = Ratio(float(row[f"added {share} ms"] or 0.0), "lower", goal, goal)
    return found


async def _places(gateways: Sequence[Contender]) -> dict[str, Ratio]:
    """The share of turns that went by the spool, and of notifications that were left to the sweep."""
    found = {}
    async with aiohttp.ClientSession() as client:
        for gateway in gateways:
            async with client.get(f"{gateway.url}/metrics") as answer:
                families = list(text_string_to_metric_families(await answer.text()))
            samples = [sample for family in families for sample in family.samples]
            turns = [sample for sample in samples if sample.name == "clawloop_gateway_turns_total"]
            total = sum(sample.value for sample in turns)
            spooled = sum(sample.value for sample in turns if sample.labels["place"] != "postgres")
            found[f"{gateway.name}: share of turns by the spool"] = Ratio(spooled / total, "lower", 0.0)
            told = [sample for sample in samples if sample.name == "clawloop_gateway_announcements_total"]
            if gateway.name == NOTIFYING and told:
                late = sum(sample.value for sample in told if sample.labels["result"] != "told")
                share = late / sum(sample.value for sample in told)
                found[f"{gateway.name}: share of notifications left to the sweep"] = Ratio(share, "lower")
    return found
