"""The parts that `clawloop up` runs: how each is started, checked for readiness, and stopped.

The `stop_within` bounds add up, along `up.STOP_ORDER`, to less than 15 s.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp

from clawloop.errors import SetupError
from clawloop.local.checks import choose_port
from clawloop.local.services import temporal_server
from clawloop.local.services import vllm as vllm_server
from clawloop.local.services.postgres import EmbeddedPostgres
from clawloop.local.services.vllm import Device, EngineOptions, ModelFacts, detect_device
from clawloop.local.supervision.part import Launch, Part
from clawloop.recipes.recipe import Recipe

LOOPBACK = "127.0.0.1"
TRAINER = "trainer"
AGENT = "engine-agent"
WORKERS = ("orchestrator", "judge", TRAINER, AGENT)
# Local servers answer a health check in milliseconds, an engine under full load within a second or two.
_HEALTH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """Addresses and settings of one `clawloop up`, for preparing the database and starting gateway and workers.

    Args:
        engines: URLs.
        base_model: the name under which the engines serve version 0.
        aliases: further model names of the policy.
        keys: secrets by scope, created by earlier starts.
        allowed_hosts: host names that clients may use for the gateway, besides loopback and addresses.
        recipe: the policy's recipe from now on; None: the stored one, or the default.
        trained_model: folder of the base weights; None: no trainer.
        dtype: of the base weights; None: the model's own.
        local_engine: URL of the engine started here, which needs an agent; None: agents run elsewhere.
        max_lora_rank: highest rank of an adapter that the engines can load.
    """

    data: Path
    database_url: str
    temporal_address: str
    engines: tuple[str, ...]
    base_model: str
    aliases: tuple[str, ...]
    keys: Mapping[str, str]
    allowed_hosts: tuple[str, ...] = ()
    recipe: Recipe | None = None
    trained_model: Path | None = None
    dtype: str | None = None
    local_engine: str | None = None
    max_lora_rank: int = 16


def postgres(server: EmbeddedPostgres) -> Part:
    def prepare() -> Launch:
        command = server.prepare()
        user = None if command.user is None or command.group is None else (command.user, command.group)
        return Launch(tuple(command.argv), command.env, command.cwd, user)

    def answers() -> bool:
        try:
            server.wait_ready(timeout_seconds=0)
        except SetupError:
            return False
        return True

    async def is_ready() -> bool:
        return await asyncio.to_thread(answers)

    return Part(
        name="postgres",
        address=f"{LOOPBACK}:{server.port}",
        prepare=prepare,
        is_ready=is_ready,
        stop_signal=signal.SIGINT,  # PostgreSQL's fast shutdown: disconnects clients, writes a checkpoint
        stop_within=timedelta(seconds=4),
    )


def temporal(folder: Path, ports: temporal_server.Ports, environment: Mapping[str, str]) -> Part:
    return Part(
        name="temporal",
        address=f"{LOOPBACK}:{ports.main}, UI http://{LOOPBACK}:{ports.ui}",
        prepare=lambda: temporal_server.launch(folder, ports, environment),
        is_ready=lambda: temporal_server.is_ready(ports.http),
        stop_within=timedelta(seconds=3),
    )


def vllm(
    model: ModelFacts, options: EngineOptions, environment: Mapping[str, str], device: Device | None = None
) -> Part:
    device = device or detect_device()
    url = f"http://{LOOPBACK}:{options.port}"
    return Part(
        name="vllm",
        address=f"{url}, {model.name} on {device.upper()}",
        prepare=lambda: vllm_server.launch(model, options, device, environment),
        is_ready=lambda: answers_ok(f"{url}/health"),
        stop_within=timedelta(seconds=3),  # it has no state to save
        # Reading a large model from a slow disk; the tiny model takes 40 s on two cores.
        start_within=timedelta(minutes=30),
        progress=vllm_server.progress,
    )


def gateway(deployment: Deployment, host: str, port: int, environment: Mapping[str, str]) -> Part:
    url = gateway_url(host, port)
    settings = _settings(deployment)
    names = (f"--allowed-host={name}" for name in deployment.allowed_hosts)
    command = (sys.executable, "-m", "clawloop.cli.main", "gateway", "--host", host, "--port", str(port), *names)
    return Part(
        name="gateway",
        address=url,
        prepare=lambda: Launch(command, dict(environment) | settings),
        is_ready=lambda: answers_ok(f"{url}/healthz"),
        stop_within=timedelta(seconds=4),  # running replies are cut and recorded as aborted
    )


def workers(deployment: Deployment, environment: Mapping[str, str]) -> list[Part]:
    started = [_worker(role, (role,), deployment, environment) for role in ("orchestrator", "judge")]
    if deployment.local_engine is not None:
        started.append(_worker(AGENT, ("engine", "--engine", deployment.local_engine), deployment, environment))
    if deployment.trained_model is not None:
        options = ["--model", str(deployment.trained_model), "--base-model", deployment.base_model]
        options += [] if deployment.dtype is None else ["--dtype", deployment.dtype]
        started.append(_worker(TRAINER, ("trainer", *options), deployment, environment))
    return started


def _worker(name: str, arguments: Sequence[str], deployment: Deployment, environment: Mapping[str, str]) -> Part:
    port = choose_port(f"the {name}", LOOPBACK, 0, "")
    url = f"http://{LOOPBACK}:{port}"
    command = (sys.executable, "-m", "clawloop.cli.main", "worker", *arguments, "--health-port", str(port))
    return Part(
        name=name,
        address=url,
        prepare=lambda: Launch(command, dict(environment) | _settings(deployment)),
        is_ready=lambda: answers_ok(f"{url}/readyz"),
        stop_within=timedelta(seconds=4),  # Temporal retries its activities after the next start
        start_within=timedelta(minutes=10),  # it is ready only once Temporal answers
    )


def _settings(deployment: Deployment) -> dict[str, str]:
    return {
        "CLAWLOOP_DATA": str(deployment.data),
        "CLAWLOOP_ENGINES": ",".join(deployment.engines),
        "DATABASE_URL": deployment.database_url,
        "TEMPORAL_ADDRESS": deployment.temporal_address,
    }


def gateway_url(host: str, port: int) -> str:
    """URL by which this machine reaches a gateway that listens on `host`."""
    target = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{target}]:{port}" if ":" in target else f"http://{target}:{port}"


async def answers_ok(url: str) -> bool:
    """True if a GET is answered with 200."""
    limit = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
