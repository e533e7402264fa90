"""The parts of `clawloop up`: for each how it starts, how it is asked whether it is ready, how it is ended.

Knows nothing about the order in which they start. The bounds for ending them add up, along `up.STOP_ORDER`, to less
than 15 s.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import aiohttp

from clawloop.errors import SetupError
from clawloop.local.checks import choose_port
from clawloop.local.services import temporal_server
from clawloop.local.services import vllm as vllm_server
from clawloop.local.services.postgres import EmbeddedPostgres
from clawloop.local.services.vllm import Device, EngineOptions, ModelFacts, detect_device
from clawloop.local.supervision.part import Launch, Part

LOOPBACK = "127.0.0.1"
TRAINER = "trainer"
AGENT = "engine-agent"
WORKERS = ("orchestrator", "judge", TRAINER, AGENT)
# Local servers answer a health question in milliseconds, an engine under full load within a second or two.
_HEALTH_SECONDS = 10.0


class GatewayFacts(Protocol):
    """What the gateway's process must be told."""

    @property
    def data(self) -> Path: ...

    @property
    def database_url(self) -> str: ...

    @property
    def temporal_address(self) -> str: ...

    @property
    def engines(self) -> tuple[str, ...]: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...


class LearningFacts(GatewayFacts, Protocol):
    """What the workers' processes must be told.

    Properties:
        model: the folder the trainer learns on; None: no trainer.
        own_engine: the engine that needs an agent beside it; None if others care for it.
    """

    @property
    def base_model(self) -> str: ...

    @property
    def model(self) -> Path | None: ...

    @property
    def dtype(self) -> str | None: ...

    @property
    def own_engine(self) -> str | None: ...


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
        stop_signal=signal.SIGINT,  # fast shutdown: clients are let go, data is written
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
    on = device or detect_device()
    url = f"http://{LOOPBACK}:{options.port}"
    return Part(
        name="vllm",
        address=f"{url}, {model.name} on {on.upper()}",
        prepare=lambda: vllm_server.launch(model, options, on, environment),
        is_ready=lambda: answers_ok(f"{url}/health"),
        stop_within=timedelta(seconds=3),  # it has nothing to save
        # Weights of a large model from a slow disk; the tiny one takes 40 s on two cores.
        start_within=timedelta(minutes=30),
        progress=vllm_server.progress,
    )


def gateway(facts: GatewayFacts, host: str, port: int, environment: Mapping[str, str]) -> Part:
    url = gateway_url(host, port)
    settings = _settings(facts)
    names = (f"--allowed-host={name}" for name in facts.allowed_hosts)
    command = (sys.executable, "-m", "clawloop.cli.main", "gateway", "--host", host, "--port", str(port), *names)
    return Part(
        name="gateway",
        address=url,
        prepare=lambda: Launch(command, dict(environment) | settings),
        is_ready=lambda: answers_ok(f"{url}/healthz"),
        stop_within=timedelta(seconds=4),  # running replies are cut, recorded as aborted, spooled if need be
    )


def workers(facts: LearningFacts, environment: Mapping[str, str]) -> list[Part]:
    parts = [_worker(role, (role,), facts, environment) for role in ("orchestrator", "judge")]
    if facts.own_engine is not None:
        parts.append(_worker(AGENT, ("engine", "--engine", facts.own_engine), facts, environment))
    if facts.model is not None:
        options = ["--model", str(facts.model), "--base-model", facts.base_model]
        options += [] if facts.dtype is None else ["--dtype", facts.dtype]
        parts.append(_worker(TRAINER, ("trainer", *options), facts, environment))
    return parts


def _worker(name: str, words: Sequence[str], facts: GatewayFacts, environment: Mapping[str, str]) -> Part:
    port = choose_port(f"the {name}", LOOPBACK, 0, "")
    url = f"http://{LOOPBACK}:{port}"
    command = (sys.executable, "-m", "clawloop.cli.main", "worker", *words, "--health-port", str(port))
    return Part(
        name=name,
        address=url,
        prepare=lambda: Launch(command, dict(environment) | _settings(facts)),
        is_ready=lambda: answers_ok(f"{url}/readyz"),
        stop_within=timedelta(seconds=4),  # what it was doing goes on after the next start
        start_within=timedelta(minutes=10),  # it waits for Temporal by itself
    )


def _settings(facts: GatewayFacts) -> dict[str, str]:
    return {
        "CLAWLOOP_DATA": str(facts.data),
        "CLAWLOOP_ENGINES": ",".join(facts.engines),
        "DATABASE_URL": facts.database_url,
        "TEMPORAL_ADDRESS": facts.temporal_address,
    }


def gateway_url(host: str, port: int) -> str:
    """Where this machine finds a gateway that listens on `host`."""
    reached = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


async def answers_ok(url: str) -> bool:
    """Whether a GET is answered with 200."""
    limit = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
