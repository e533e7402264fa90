"""What the gate takes, and what chats beside it notice.

Everything is real, on the demo's model: PostgreSQL, Temporal, vLLM, gateway, orchestrator, judge worker, trainer and
engine agent. Two policies learn from rated replies in turn: one whose versions pass the numbers alone, and one that
also has replay and probes. Meanwhile clients stream from a third policy, which never learns, so that neither judging
nor publishing of their own replies is measured. Chat alone alternates with both within one run.

The learning rate is so low that all versions pass: what a gate takes does not depend on what it decides.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psycopg

from benchmarks import contenders
from benchmarks.load import percentile
from benchmarks.processes import LOOPBACK, free_port, module, running, running_temporal, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.contracts.gate_checks import SECONDS, CheckName
from clawloop.demo.probes import demo_probes
from clawloop.demo.world import CHAT
from clawloop.layout.engine import probes_at_once
from clawloop.local.services.postgres import running_postgres
from clawloop.local.services.vllm import max_num_seqs
from clawloop.processes.bootstrap import prepare
from tests.e2e.conftest import running_engine
from tests.e2e.publishing import Listener, chatting
from tests.e2e.toy import CONTEXT_TOKENS, toy_model
from tests.engine_options import engine_options

BATCH = 4
REPLAYED = 64
DRAWN = 10
ALONE, NUMBERS, GATED = "chat alone", "steps, numbers only", "steps, whole gate"
PROBING = "while probes are asked"
FIRST = "gate: probes, the first version, whose parent and base model are asked as well"
STEP = "step with its numbers and replay"
# Which policy learns in a state.
LEARNERS = {NUMBERS: "plain", GATED: "gated"}
# After a change of state, so that requests of the former one have ended.
SETTLE_SECONDS = 2.0
PATIENCE_SECONDS = 900.0
_POLL_SECONDS = 0.25
_AT_ONCE = 8


def recipe(name: str, gate: Mapping[str, object]) -> dict[str, Any]:
    return {
        "name": name,
        "signal": {"hints": False, "m": 1, "at_least_one": False},
        "train": {
            "batch_samples": BATCH,
            "advantage": {"teacher_weight": 0.0},
            "lora": {"rank": 8, "alpha": 16},
            "optimiser": {"lr": 1e-6},
        },
        "gate": dict(gate),
    }


RECIPES = {
    "plain": recipe("numbers_only", {}),
    "gated": recipe("whole_gate", {"held_out": 0.5, "replay_turns": REPLAYED, "drawn_probes": DRAWN}),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--probes-at-once", type=int, default=None, help="default: as `clawloop up` for this engine")
    parser.add_argument("--rounds", type=int, default=None, help="default: 4; 1 with --quick")
    parser.add_argument("--steps", type=int, default=None, help="of each policy in a round; default: 4; 2 with --quick")


@dataclass
class Measured:
    """
    Attributes:
        windows: begin and end of each state in each round, by `time.perf_counter`.
        taken: seconds of each stage of the gated policy's versions, in their order.
        probing: begin and end of each time in which probes were asked.
    """

    windows: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {ALONE: [], NUMBERS: [], GATED: []})
    taken: dict[str, list[float]] = field(default_factory=dict)
    probing: list[tuple[float, float]] = field(default_factory=list)


def run(options: argparse.Namespace) -> Result:
    rounds, steps = options.rounds or (1 if options.quick else 4), options.steps or (2 if options.quick else 4)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = toy_model(folder)
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        layout = engine_options(model, free_port(), max_model_len=CONTEXT_TOKENS, policies=1 + len(LEARNERS))
        engine = stack.enter_context(running_engine(model, layout, folder / "vllm.log"))
        keys = asyncio.run(prepare(postgres.url, model.name, [], [engine], {}))
        settings = {
            "DATABASE_URL": postgres.url,
            "TEMPORAL_ADDRESS": temporal,
            "CLAWLOOP_DATA": str(folder / "data"),
            "CLAWLOOP_PROBES_AT_ONCE": str(options.probes_at_once or probes_at_once(max_num_seqs(layout))),
        }
        gateway = stack.enter_context(
            contenders.gateway("clawloop", folder / "data", postgres.url, keys["chat"], temporal, 1)
        )
        roles = {
            "orchestrator": [],
            "judge": [],
            "trainer": ["--model", str(model), "--base-model", model.name],
            "engine": ["--engine", engine],
        }
        for role, more in roles.items():
            port, log = free_port(), folder / f"{role}.log"
            command = module("clawloop.cli.main", "worker", role, *more, "--health-port", port)
            worker = stack.enter_context(running(command, log, settings))
            wait_for(f"http://{LOOPBACK}:{port}/readyz", worker, log)
        measured, seen = asyncio.run(_measure(gateway.url, keys, postgres.url, options.clients, rounds, steps))
    if seen.errors:
        raise RuntimeError(f"{len(seen.errors)} answers failed: {seen.errors[0]}")
    return _result(measured, seen)


def _result(measured: Measured, seen: Listener) -> Result:
    windows = {**measured.windows, PROBING: measured.probing}
    gaps = {what: [gap for window in spans for gap in seen.gaps_between(*window)] for what, spans in windows.items()}
    speed = {what: len(gaps[what]) / sum(end - began for began, end in spans) for what, spans in windows.items()}
    rows = [_row(f"{what}: gap, ms", [gap * 1000 for gap in gaps[what]], speed[what]) for what in windows]
    rows += [_row(f"{stage}, s", seconds, None) for stage, seconds in measured.taken.items() if seconds]
    ratios = {
        "seconds of a gate, p50": Ratio(median(measured.taken["gate"]), "lower"),
        "seconds of a gate to those of its step, p50": Ratio(
            median(measured.taken["gate"]) / median(measured.taken[STEP]), "lower"
        ),
        "tokens a second, whole gate to numbers only": Ratio(speed[GATED] / speed[NUMBERS], "higher"),
        "gap p50, whole gate to numbers only": Ratio(median(gaps[GATED]) / median(gaps[NUMBERS]), "lower"),
        "gap p99, whole gate to numbers only": Ratio(
            percentile(gaps[GATED], 0.99) / percentile(gaps[NUMBERS], 0.99), "lower"
        ),
        "tokens a second, while probes are asked to alone": Ratio(speed[PROBING] / speed[ALONE], "higher"),
    }
    raw = {f"gaps, {what}": found for what, found in gaps.items()} | measured.taken
    return Result(rows, ratios, raw)


def _row(what: str, values: list[float], tokens_a_second: float | None) -> dict[str, Figure]:
    return {
        "what": what,
        "count": len(values),
        "p50": median(values),
        "p99": percentile(values, 0.99),
        "max": max(values),
        "tokens/s": tokens_a_second,
    }


async def _measure(
    url: str, keys: dict[str, str], database_url: str, clients: int, rounds: int, steps: int
) -> tuple[Measured, Listener]:
    measured = Measured()
    admin = {"Authorization": f"Bearer {keys['admin']}"}
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, headers=admin, timeout=limit) as client:
        # One step more than is measured may begin before a pause holds.
        for policy in LEARNERS.values():
            await _prepare(client, database_url, policy, BATCH * (steps + 1) * rounds)
        # A side turn is not judged, and nothing is learned from it.
        async with chatting(url, keys["chat"], clients, {"X-Turn-Type": "side"}) as seen:
            await asyncio.sleep(SETTLE_SECONDS)
            for _ in range(rounds):
                for state in measured.windows:
                    await asyncio.sleep(SETTLE_SECONDS)
                    began = time.perf_counter()
                    if state in LEARNERS:
                        await _learn(client, LEARNERS[state], steps)
                    else:  # as long as what follows takes, about
                        await asyncio.sleep(3.0 * steps)
                    measured.windows[state].append((began, time.perf_counter()))
        await _read_gates(client, database_url, measured)
    return measured, seen


async def _prepare(client: aiohttp.ClientSession, database_url: str, policy: str, samples: int) -> None:
    """Make a policy, paused, with so many rated replies to learn from, and with held-out ones and probes as its recipe
    says."""
    await _ask(client, "policies", {"name": policy, "recipe": RECIPES[policy]})
    await _ask(client, f"training/pause?policy={policy}", {"reason": "the benchmark chooses when it learns"})
    key = (await _ask(client, "keys", {"policy": policy, "name": policy}))["key"]
    held_out = REPLAYED if RECIPES[policy]["gate"] else 0
    if held_out:
        probes = [{"messages": list(probe.messages), "regex": probe.regex} for probe in demo_probes()]
        await _ask(client, f"policies/{policy}/probes", {"probes": probes})
    requests, rated = cycle(request.text for requests in zip(*CHAT.values(), strict=False) for request in requests), 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        fresh, kept = await asyncio.to_thread(_counts, database_url, policy)
        if fresh >= samples and kept >= held_out:
            return
        if time.monotonic() > deadline:
            found = f"{fresh} of {samples} samples and {kept} of {held_out} held-out ones"
            raise RuntimeError(f"{policy} has {found} of {rated} rated replies")
        if rated > fresh + kept:  # their verdicts are under way
            await asyncio.sleep(_POLL_SECONDS)
            continue
        more = list(islice(requests, _AT_ONCE))
        await asyncio.gather(*(_rated(client, key, text, up=bool((rated + at) % 2)) for at, text in enumerate(more)))
        rated += len(more)


async def _rated(client: aiohttp.ClientSession, key: str, text: str, *, up: bool) -> None:
    """A reply in a session of its own, and its rating."""
    chat = {"Authorization": f"Bearer {key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    async with client.post("/v1/chat/completions", json=body, headers=chat) as answer:
        answer.raise_for_status()
        response = (await answer.json())["id"]
    rating = {"response_id": response, "rating": "up" if up else "down"}
    async with client.post("/v1/feedback", json=rating, headers=chat) as answer:
        answer.raise_for_status()


def _counts(database_url: str, policy: str) -> tuple[int, int]:
    with psycopg.connect(database_url) as connection:
        query = "SELECT state, count(*) FROM samples WHERE policy = %s GROUP BY state"
        found: dict[str, int] = dict(connection.execute(query, [policy]).fetchall())
    return found.get("fresh", 0), found.get("held_out", 0)


async def _learn(client: aiohttp.ClientSession, policy: str, steps: int) -> None:
    """Let the policy learn until so many further versions are decided and published."""
    path = f"training?policy={policy}"
    first = (await _ask(client, path))["step"]
    await _ask(client, f"training/resume?policy={policy}", {})
    await _until(client, path, lambda status: status["step"] >= first + steps)
    await _ask(client, f"training/pause?policy={policy}", {"reason": "the benchmark chooses when it learns"})
    await _until(client, path, lambda status: status["progress"] is None)


async def _until(client: aiohttp.ClientSession, path: str, holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(status := await _ask(client, path)):
        by_itself = status["state"] == "paused" and "the benchmark" not in status["reason"]
        if by_itself or time.monotonic() > deadline:
            raise RuntimeError(f"it does not learn: {status}")
        await asyncio.sleep(_POLL_SECONDS)


async def _read_gates(client: aiohttp.ClientSession, database_url: str, measured: Measured) -> None:
    """What the stored figures say of the gated policy's versions."""
    taken: dict[str, list[float]] = {
        name: []
        for name in (
            "gate",
            *(f"gate: {check}" for check in (CheckName.NUMBERS, CheckName.REPLAY, CheckName.PROBES)),
            FIRST,
            STEP,
            "candidate to decision",
        )
    }
    for version in (await _ask(client, f"policies/{LEARNERS[GATED]}/versions"))["versions"][1:]:
        if "rejected" in version["state"]:
            raise RuntimeError(f"version {version['n']} was rejected, so the next steps differ: {version['gate']}")
        seconds = {check["name"]: check["figures"][SECONDS] for check in version["gate"]}
        if version["n"] == 1:
            taken[FIRST].append(seconds[CheckName.PROBES])
            continue
        taken["gate"].append(version["gate_seconds"])
        for check, value in seconds.items():
            taken[f"gate: {check}"].append(value)
        taken[STEP].append(version["metrics"]["seconds"])
    rows = await asyncio.to_thread(_decisions, database_url)
    taken["candidate to decision"] += [waited for n, waited, _, _ in rows if n > 1]
    to_perf = time.perf_counter() - time.time()
    measured.probing = [(ended - asking + to_perf, ended + to_perf) for _, _, ended, asking in rows]
    measured.taken = taken


def _decisions(database_url: str) -> Sequence[tuple[int, float, float, float]]:
    """Of each version of the gated policy: its number, seconds as a candidate, when its probes were asked, how long."""
    query = """
        SELECT v.n, extract(epoch FROM s.finished_at - v.created_at)::float8, extract(epoch FROM c.at)::float8,
            (c.figures->>'seconds')::float8
        FROM versions v JOIN steps s ON s.policy = v.policy AND s.n = v.n
            JOIN gate_checks c ON c.policy = v.policy AND c.version = v.n AND c.name = 'probes'
        WHERE v.policy = %s ORDER BY v.n"""
    with psycopg.connect(database_url) as connection:
        return connection.execute(query, [LEARNERS[GATED]]).fetchall()


async def _ask(client: aiohttp.ClientSession, path: str, body: object = None) -> Any:
    """What the admin API answers; with a body to a POST."""
    method = "GET" if body is None else "POST"
    async with client.request(method, f"/admin/v1/{path}", json=body) as answer:
        if answer.status >= 300:
            raise RuntimeError(f"{path}: {answer.status}: {await answer.text()}")
        return await answer.json()
