"""From feedback to a version that answers: what it takes beyond the step's own computing.

Everything is real, on the random tiny model: PostgreSQL, Temporal, vLLM, gateway, orchestrator, judge worker, trainer,
engine agent. A rating is a verdict, so one rated turn makes a step of one sample.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import contenders
from benchmarks.processes import LOOPBACK, free_port, module, running, running_temporal, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.local.services.postgres import running_postgres
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.processes.bootstrap import prepare
from clawloop.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.training.recipes import set_recipe
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options

RECIPE = Recipe.model_validate(
    {
        "name": "binary",
        "signal": {"hints": False, "m": 1},
        "train": {"batch_samples": 1, "advantage": {"teacher_weight": 0.0}, "lora": {"rank": 8, "alpha": 16}},
    }
)
SERVED_SECONDS = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=None, help="default: 20; 3 with --quick")


def run(options: argparse.Namespace) -> Result:
    steps = options.steps or (3 if options.quick else 20)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        engine = stack.enter_context(running_engine(model, engine_options(model, free_port()), folder / "vllm.log"))
        keys = asyncio.run(prepare(postgres.url, model.name, [], [engine], {}))
        asyncio.run(_use_recipe(postgres.url))
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
            command = module("clawloop.cli.main", "worker", role, *more, "--health-port", port)
            workers[role] = stack.enter_context(running(command, folder / f"{role}.log", settings))
        for role, (port, _) in roles.items():
            wait_for(f"http://{LOOPBACK}:{port}/readyz", workers[role], folder / f"{role}.log")
        rows = asyncio.run(_measure(gateway.url, keys, trainer, steps))
    beyond = [float(row["beyond computing s"] or 0) for row in rows[1:]]  # the first step also loads and compiles
    raw = {"beyond computing s": beyond, "whole s": [float(row["feedback to served s"] or 0) for row in rows[1:]]}
    ratios = {"feedback to served weights beyond computing, p50 s": Ratio(median(beyond), "lower", 1.0)}
    return Result(rows, ratios, raw)


async def _use_recipe(url: str) -> None:
    database = Database(url, BACKGROUND_LIMIT)
    await set_recipe(database, "default", RECIPE)
    await database.close()


async def _measure(url: str, keys: dict[str, str], trainer: int, steps: int) -> list[dict[str, Figure]]:
    rows: list[dict[str, Figure]] = []
    chat = {"Authorization": f"Bearer {keys['chat']}"}
    admin = {"Authorization": f"Bearer {keys['admin']}"}
    async with aiohttp.ClientSession(url) as client:
        for number in range(1, steps + 1):
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": f"Tell me tale {number}."}],
                "max_tokens": 16,
                "ignore_eos": True,
            }
            async with client.post("/v1/chat/completions", json=body, headers=chat) as answer:
                answer.raise_for_status()
                response = (await answer.json())["id"]
            computed = await _step_seconds(trainer)
            began = time.perf_counter()
            rating = {"response_id": response, "rating": "up" if number % 2 else "down"}
            async with client.post("/v1/feedback", json=rating, headers=chat) as answer:
                answer.raise_for_status()
            while True:
                async with client.get("/admin/v1/training", headers=admin) as answer:
                    status = await answer.json()
                if status["version"] >= number:
                    break
                if status["state"] == "paused" or time.perf_counter() - began > SERVED_SECONDS:
                    raise RuntimeError(f"version {number} is not served: {status}")
                await asyncio.sleep(0.01)
            whole = time.perf_counter() - began
            computing = await _step_seconds(trainer) - computed
            rows.append(
                {
                    "step": number,
                    "feedback to served s": whole,
                    "computing s": computing,
                    "beyond computing s": whole - computing,
                }
            )
    return rows


async def _step_seconds(trainer: int) -> float:
    """Seconds that the trainer has computed: from a batch's arrival until its adapter is written."""
    async with aiohttp.ClientSession() as client, client.get(f"http://{LOOPBACK}:{trainer}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    name = "clawloop_trainer_step_seconds_sum"
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
