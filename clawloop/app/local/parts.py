"""The parts that `clawloop up` runs: how each is started, checked for readiness, and stopped.

The `stop_within` bounds add up, along `stop_order`, to less than 20 s.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import aiohttp

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import temporal_server
from clawloop.app.local.services import vllm as vllm_server
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.local.services.vllm import EngineOptions, ModelFacts
from clawloop.app.local.supervision.supervisor import Launch, Part, RestartPolicy
from clawloop.core.encryption.key_file import SETTING
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, Recipe

LOOPBACK = "127.0.0.1"
ORCHESTRATOR = "orchestrator"
JUDGE = "judge"
COMBINED = "combined-worker"
TRAINER = "trainer"
AGENT = "engine-agent"
ENVIRONMENT = "environment"
ENGINE = "vllm"
JUDGE_ENGINE = "vllm-judge"
# Clients wait for it: back at once, and soon even if it dies again and again.
GATEWAY_RESTART = RestartPolicy(
    first_delay=timedelta(seconds=0.1), longest_delay=timedelta(seconds=2), reset_after=timedelta(seconds=10)
)
# Local servers answer a health check in milliseconds, an engine under full load within a second or two.
_HEALTH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class JudgeEngine:
    """
    Args:
        model: the name by which it serves its model.
        secret: of its guard.
    """

    url: str
    model: str
    secret: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """Addresses and settings of one `clawloop up`, for preparing the database and starting gateway and workers.

    Args:
        engines: URLs.
        base_model: the name under which the engines serve version 0.
        aliases: further model names of the policy.
        keys: secrets by scope, created by earlier starts.
        allowed_hosts: host names that clients may use for the gateway, besides loopback and addresses.
        recipe: the policy's recipe from now on; None: the stored one, or `first_recipe`.
        first_recipe: of a policy that has none yet.
        trained_model: folder of the base weights; None: no trainer.
        trainer_arguments, trainer_environment: what the layout gives the trainer.
        local_engines: URLs of the engines started here, each of which needs an agent; agents of others run elsewhere.
        judge: the judge engine started here; None: judges are those of the settings.
        max_lora_rank: highest rank of an adapter that the engines can load.
        sandboxed: URL of the gateways for an environment worker; None: none is started.
        quantised: engines and trainer compute with different weights.
        temporal_ui, page: addresses of Temporal's UI and of the page; None if not known.
        gateway: URL of the gateways on this machine; None if not known.
        context_tokens: the longest context of the engines started here.
        engine_chats: CLAWLOOP_ENGINE_CHATS of each gateway; None: no bound.
        probes: CLAWLOOP_PROBES_AT_ONCE of the judge worker; None: that of the settings.
        grammars: CLAWLOOP_CHAT_BOUNDS__STRUCTURED_REQUESTS_TOGETHER of each gateway; None: that of the settings.
        encryption_key_file: CLAWLOOP_ENCRYPTION_KEY_FILE.
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
    first_recipe: Recipe = DEFAULT_RECIPE
    trained_model: Path | None = None
    trainer_arguments: tuple[str, ...] = ()
    trainer_environment: Mapping[str, str] = field(default_factory=dict)
    local_engines: tuple[str, ...] = ()
    judge: JudgeEngine | None = None
    max_lora_rank: int = 16
    sandboxed: str | None = None
    quantised: bool = False
    temporal_ui: str | None = None
    page: str | None = None
    encryption_key_file: Path | None = None
    gateway: str | None = None
    context_tokens: int | None = None
    engine_chats: int | None = None
    probes: int | None = None
    grammars: int | None = None


def numbered(name: str, number: int, count: int) -> str:
    """The name of one of several parts of a kind, and of the only one: `vllm`, or `vllm-0`."""
    return name if count == 1 else f"{name}-{number}"


def stop_order(names: Iterable[str]) -> list[list[str]]:
    """Parts in the groups that stop one after another: writers before what they write to.

    The bounds of the groups add up to less than the promised 20 s.
    """
    groups: list[list[str]] = [[], [], []]
    for name in names:
        written_to = 2 if name == "postgres" else 1 if name == "temporal" or name.startswith(ENGINE) else 0
        groups[written_to].append(name)
    return groups


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
        starting="opening the database, usually 1 to 4 s",
    )


def temporal(folder: Path, ports: temporal_server.Ports, environment: Mapping[str, str]) -> Part:
    return Part(
        name="temporal",
        address=f"{LOOPBACK}:{ports.main}, UI http://{LOOPBACK}:{ports.ui}",
        prepare=lambda: temporal_server.launch(folder, ports, environment),
        is_ready=lambda: temporal_server.is_ready(ports.http),
        stop_within=timedelta(seconds=3),
        starting="opening its database, usually 1 s",
    )


def vllm(name: str, model: ModelFacts, options: EngineOptions, where: str, environment: Mapping[str, str]) -> Part:
    """
    Args:
        where: the devices it is on, for people.
    """
    url = f"http://{LOOPBACK}:{options.port}"
    return Part(
        name=name,
        address=f"{url}, {model.name} on {where}",
        prepare=lambda: vllm_server.launch(model, options, environment),
        is_ready=lambda: answers_ok(f"{url}/health"),
        stop_within=timedelta(seconds=3),  # it has no state to save
        # Reading a large model from a slow disk; the tiny model takes 40 s on two cores.
        start_within=timedelta(minutes=30),
        starting=f"loading the model, {vllm_server.LOADING_TIME}",
        progress=vllm_server.progress,
    )


def gateways(deployment: Deployment, listener: socket.socket, count: int, environment: Mapping[str, str]) -> list[Part]:
    """Gateways that share a socket, which the caller keeps open."""
    names = [numbered("gateway", number, count) for number in range(count)]
    ports = {name: choose_port("the gateway's health", LOOPBACK, 0, "") for name in names}
    return [
        _gateway(deployment, listener, name, port, [peer for peer in ports.values() if peer != port], environment)
        for name, port in ports.items()
    ]


def _gateway(
    deployment: Deployment,
    listener: socket.socket,
    name: str,
    health_port: int,
    peers: Sequence[int],
    environment: Mapping[str, str],
) -> Part:
    command = [sys.executable, "-m", "clawloop.app.cli.main", "gateway", "--fd", str(listener.fileno())]
    command += ["--health-port", str(health_port), *(["--name", name] if peers else [])]
    command += [f"--peer={peer}" for peer in peers]
    command += [f"--allowed-host={host}" for host in deployment.allowed_hosts]
    # The gateway asks the judge too, to compare stored verdicts.
    variables = _with_judge(deployment, environment) | _settings(deployment)
    if deployment.engine_chats is not None:
        variables.setdefault("CLAWLOOP_ENGINE_CHATS", str(deployment.engine_chats))
    if deployment.grammars is not None:
        variables.setdefault("CLAWLOOP_CHAT_BOUNDS__STRUCTURED_REQUESTS_TOGETHER", str(deployment.grammars))
    launch = Launch(tuple(command), variables, pass_fds=(listener.fileno(),))
    return Part(
        name=name,
        address=gateway_url(*listener.getsockname()[:2]),
        prepare=lambda: launch,
        is_ready=lambda: answers_ok(f"http://{LOOPBACK}:{health_port}/healthz"),
        stop_signal=signal.SIGINT,  # SIGTERM would wait for running replies; these are cut and recorded as aborted
        stop_within=timedelta(seconds=9),  # it takes 3; of 6 on a busy machine the last would record what was cut
        start_within=timedelta(minutes=10),  # on a machine that is busy with something else
        starting="connecting to PostgreSQL and Temporal, usually 15 s",
        restart=GATEWAY_RESTART,
    )


def workers(deployment: Deployment, environment: Mapping[str, str]) -> list[Part]:
    """All workers but the trainer: with one engine in one process, with several in a process each.

    One process has 230 MB less (measured), and one core's Python at most, which several engines may outrun.
    """
    is_small = len(deployment.engines) <= 1
    started = [combined_worker(deployment, environment)] if is_small else separate_workers(deployment, environment)
    if deployment.sandboxed is not None:
        arguments = ("environment", "--gateway", deployment.sandboxed)
        started.append(_worker(ENVIRONMENT, arguments, deployment, environment))
    return started


def combined_worker(deployment: Deployment, environment: Mapping[str, str]) -> Part:
    """Orchestrator, judge and, if the engine is started here, its agent, in one process."""
    roles: tuple[str, ...] = (ORCHESTRATOR, JUDGE)
    arguments: tuple[str, ...] = ("combined",)
    if deployment.local_engines:
        [url] = deployment.local_engines
        roles, arguments = (*roles, AGENT), (*arguments, "--engine", url)
    part = _worker(COMBINED, arguments, deployment, _judging(deployment, environment))
    return replace(part, roles=roles, progress=_said_by_a_role)


def separate_workers(deployment: Deployment, environment: Mapping[str, str]) -> list[Part]:
    """Orchestrator, judge, and the agents of the engines that are started here, in a process each."""
    engines = deployment.local_engines
    return [
        _worker(ORCHESTRATOR, (ORCHESTRATOR,), deployment, environment),
        _worker(JUDGE, (JUDGE,), deployment, _judging(deployment, environment)),
        *(
            _worker(numbered(AGENT, number, len(engines)), ("engine", "--engine", url), deployment, environment)
            for number, url in enumerate(engines)
        ),
    ]


def _judging(deployment: Deployment, environment: Mapping[str, str]) -> dict[str, str]:
    given = _with_judge(deployment, environment)
    if deployment.probes is not None:
        given.setdefault("CLAWLOOP_PROBES_AT_ONCE", str(deployment.probes))
    return given


def _said_by_a_role(line: str) -> str | None:
    """A log line with the role that says it; None for other lines."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return f"{said['role']}: {said['message']}" if isinstance(said, dict) and "role" in said else None


def trainer(model: Path, deployment: Deployment, environment: Mapping[str, str]) -> Part:
    options = ("--model", str(model), "--base-model", deployment.base_model, *deployment.trainer_arguments)
    given = {**environment, **deployment.trainer_environment}
    return _worker(TRAINER, ("trainer", *options), deployment, given)


def _worker(name: str, arguments: Sequence[str], deployment: Deployment, environment: Mapping[str, str]) -> Part:
    port = choose_port(f"the {name}", LOOPBACK, 0, "")
    url = f"http://{LOOPBACK}:{port}"
    command = (sys.executable, "-m", "clawloop.app.cli.main", "worker", *arguments, "--health-port", str(port))
    return Part(
        name=name,
        address=url,
        prepare=lambda: Launch(command, dict(environment) | _settings(deployment)),
        is_ready=lambda: answers_ok(f"{url}/readyz"),
        stop_within=timedelta(seconds=4),  # Temporal retries its activities after the next start
        start_within=timedelta(minutes=10),  # it is ready only once Temporal answers
        starting="connecting to PostgreSQL and Temporal, usually 15 s",
    )


def _settings(deployment: Deployment) -> dict[str, str]:
    given = {
        "CLAWLOOP_TEMPORAL_UI": deployment.temporal_ui,
        "CLAWLOOP_PAGE": deployment.page,
        SETTING: None if deployment.encryption_key_file is None else str(deployment.encryption_key_file),
    }
    return {name: value for name, value in given.items() if value is not None} | {
        "CLAWLOOP_DATA": str(deployment.data),
        "CLAWLOOP_ENGINES": ",".join(deployment.engines),
        "DATABASE_URL": deployment.database_url,
        "TEMPORAL_ADDRESS": deployment.temporal_address,
    }


def _with_judge(deployment: Deployment, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the settings of the judge engine that is started here, if one is."""
    if deployment.judge is None:
        return dict(environment)
    judge = {
        "CLAWLOOP_JUDGE_URL": deployment.judge.url,
        "CLAWLOOP_JUDGE_MODEL": deployment.judge.model,
        "CLAWLOOP_JUDGE_API_KEY": deployment.judge.secret,
    }
    # The judge is a vLLM, so it reports whether its model thinks; another API would not.
    return {"CLAWLOOP_JUDGE_FORM": "auto"} | dict(environment) | judge


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
