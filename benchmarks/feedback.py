"""Time from feedback to a version that answers, beyond the step's own computing, by the samples of a step.

A version answers once PostgreSQL names it as the active one; a chat that is sent then, and not measured, shows it.

Everything is real, on the random tiny model: PostgreSQL, Temporal, vLLM, gateway, orchestrator, judge worker, trainer,
engine agent. A rating is a verdict, so as many turns as a step has samples are rated at once, and make one version.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import psycopg
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import contenders
from benchmarks.options import at_least, sizes
from benchmarks.processes import LOOPBACK, free_port, module, running, running_temporal, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.app.processes.bootstrap import prepare
from clawloop.core.ids import version_name
from clawloop.core.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.training.recipes import set_recipe
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options

SERVED_SECONDS = 300.0
# A user rates a reply after reading it: by then the cores have recorded it and opened its session.
READ_SECONDS = 2.0
# Between two looks at whether a version answers. They are statements of PostgreSQL: requests to the admin API would
# take more of the cores that are measured.
LOOK_SECONDS = 0.01
# A gateway hears of it within milliseconds; this is far above a reply's time.
HEARD_SECONDS = 2.0


class Step(NamedTuple):
    """Seconds from the ratings until a version answers that learned from them, and those that the trainer computed."""

    whole: float
    computing: float


def add_options(parser: argparse.ArgumentParser) -> None:
    # The first step of a size also loads or compiles, so it does not count.
    parser.add_argument("--steps", type=at_least(2), default=None, help="of each size; default: 20; 3 with --quick")
    parser.add_argument(
        "--sizes", type=sizes, default=None, help="samples of a step; default: 1,4,16; 1,4 with --quick"
    )


def run(options: argparse.Namespace) -> Result:
    steps = options.steps or (3 if options.quick else 20)
    samples = options.sizes or ([1, 4] if options.quick else [1, 4, 16])
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        engine = stack.enter_context(running_engine(model, engine_options(model, free_port()), folder / "vllm.log"))
        keys = asyncio.run(prepare(postgres.url, model.name, [], [engine], {}))
        settings = {"DATABASE_URL": postgres.url, "TEMPORAL_ADDRESS": temporal, "CLAWLOOP_DATA": str(folder / "data")}
        trainer = free_port()
        roles = {
            "orchestrator": (free_port(), []),
            "judge": (free_port(), []),
            "trainer": (trainer, ["--model", str(model), "--base-model", model.name]),
            "engine": (free_port(), ["--engine", engine]),
        }
        gateway = stack.enter_context(
            contenders.gateway("clawloop", folder / "data", postgres.url, keys["chat"], temporal, 1)
        )
        workers = {}
        for role, (port, more) in roles.items():
            command = module("clawloop.app.cli.main", "worker", role, *more, "--health-port", port)
            workers[role] = stack.enter_context(running(command, folder / f"{role}.log", settings))
        for role, (port, _) in roles.items():
            wait_for(f"http://{LOOPBACK}:{port}/readyz", workers[role], folder / f"{role}.log")
        taken = {size: asyncio.run(_measure(gateway.url, keys, postgres.url, trainer, size, steps)) for size in samples}
    return _result(taken)


def _result(taken: dict[int, list[Step]]) -> Result:
    rows: list[dict[str, Figure]] = []
    beyond = {}
    for size, [_, *steps] in taken.items():
        beyond[size] = median(step.whole - step.computing for step in steps)
        rows.append(
            {
                "samples": size,
                "steps": len(steps),
                "feedback to served p50 s": median(step.whole for step in steps),
                "max s": max(step.whole for step in steps),
                "computing p50 s": median(step.computing for step in steps),
                "beyond computing p50 s": beyond[size],
            }
        )
    ratios = {
        f"{size} samples: feedback to served weights beyond computing, p50 s": Ratio(seconds, "lower", 1.0)
        for size, seconds in beyond.items()
    }
    least, most = min(beyond), max(beyond)
    growth = Ratio(beyond[most] / beyond[least], "lower", most / least, enough=1.0)
    ratios[f"beyond computing, {most} samples to {least}"] = growth
    whole = {f"{size} samples, whole s": [step.whole for step in steps] for size, steps in taken.items()}
    computing = {f"{size} samples, computing s": [step.computing for step in steps] for size, steps in taken.items()}
    return Result(rows, ratios, whole | computing)


def _recipe(samples: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "binary",
            "signal": {"hints": False, "m": 1},
            "train": {"batch_samples": samples, "advantage": {"teacher_weight": 0.0}, "lora": {"rank": 8, "alpha": 16}},
        }
    )


async def _measure(
    url: str, keys: dict[str, str], database_url: str, trainer: int, samples: int, steps: int
) -> list[Step]:
    database = Database(database_url, BACKGROUND_LIMIT)
    await set_recipe(database, "default", _recipe(samples))
    await database.close()
    taken: list[Step] = []
    chat = {"Authorization": f"Bearer {keys['chat']}"}
    async with (
        aiohttp.ClientSession(url, raise_for_status=True) as client,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as looking,
    ):

        async def reply(text: str) -> tuple[str, str]:
            """The reply's id, and the version that answered."""
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 16,
                "ignore_eos": True,
            }
            async with client.post("/v1/chat/completions", json=body, headers=chat) as answer:
                response = await answer.json()
                return response["id"], response["model"]

        async def rate(response: str, number: int) -> None:
            rating = {"response_id": response, "rating": "up" if number % 2 else "down"}
            async with client.post("/v1/feedback", json=rating, headers=chat):
                pass

        for number in range(1, steps + 1):
            tales = [f"Tell me tale {number} of {samples} for reader {reader}." for reader in range(samples)]
            replies = await asyncio.gather(*(reply(tale) for tale in tales))
            await asyncio.sleep(READ_SECONDS)
            version, computed = (await _active(looking))[0], await _step_seconds(trainer)
            began = time.perf_counter()
            await asyncio.gather(*(rate(response, number + reader) for reader, (response, _) in enumerate(replies)))
            while (now := await _active(looking))[0] <= version:
                if now[1] is not None or time.perf_counter() - began > SERVED_SECONDS:
                    raise RuntimeError(f"no version is served after {version}: {now[1] or 'training goes on'}")
                await asyncio.sleep(LOOK_SECONDS)
            whole = time.perf_counter() - began
            async with asyncio.timeout(HEARD_SECONDS):
                while (await reply("And now?"))[1] != version_name("default", now[0], ""):
                    pass
            taken.append(Step(whole, await _step_seconds(trainer) - computed))
    return taken


async def _active(looking: psycopg.AsyncConnection[Any]) -> tuple[int, str | None]:
    """The version that answers, and why training is paused."""
    found = await looking.execute("SELECT active, paused_reason FROM policies WHERE id = 'default'")
    row: tuple[int, str | None] | None = await found.fetchone()
    assert row is not None
    return row


async def _step_seconds(trainer: int) -> float:
    """Seconds that the trainer has computed: from a batch's arrival until its adapter is written."""
    async with aiohttp.ClientSession() as client, client.get(f"http://{LOOPBACK}:{trainer}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    name = "clawloop_trainer_step_seconds_sum"
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
