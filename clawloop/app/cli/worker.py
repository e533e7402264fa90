"""`clawloop worker`: the Temporal worker processes.

Heavy imports happen inside a verb; only the trainer imports torch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.plan import Quantised, model_folder
from clawloop.app.cli.terminal import Data, settings_of
from clawloop.app.local.machine import Device
from clawloop.core.errors import SetupError
from clawloop.training.options import Backend, Dtype, RankWeights

if TYPE_CHECKING:
    from clawloop.core.settings import Settings

worker_app = typer.Typer(no_args_is_help=True, help="Run a Temporal worker.")

HealthPort = Annotated[int, typer.Option(help="Port of /healthz, /readyz and /metrics; 0 serves none.")]
HealthHost = Annotated[
    str, typer.Option(help="Address of the health port; 0.0.0.0 lets Prometheus and Kubernetes reach it.")
]
LOOPBACK = "127.0.0.1"
_ENGINE = typer.Option(help="The vLLM server whose agent this is: its id from `engine list`, or its URL.")
RestartCommand = Annotated[
    str | None, typer.Option(help="Shell command that restarts a dead engine; omit if something else does.")
]


@worker_app.callback()
def worker() -> None:
    """Run a Temporal worker."""


@worker_app.command()
def orchestrator(health_port: HealthPort = 0, health_host: HealthHost = LOOPBACK, data: Data = None) -> None:
    """Run workflows, short work on PostgreSQL, and the sweep; any number of processes."""
    from clawloop.app.processes.workers import Role, run_worker

    asyncio.run(run_worker(Role.ORCHESTRATOR, _logging_settings(data), health_port, health_host))


@worker_app.command()
def judge(health_port: HealthPort = 0, health_host: HealthHost = LOOPBACK, data: Data = None) -> None:
    """Collect votes and hints, decide verdicts, make samples; any number of processes."""
    from clawloop.app.processes.workers import Role, run_worker

    asyncio.run(run_worker(Role.JUDGE, _logging_settings(data), health_port, health_host))


@worker_app.command()
def combined(
    engine: Annotated[str | None, _ENGINE] = None,
    restart_command: RestartCommand = None,
    health_port: HealthPort = 0,
    health_host: HealthHost = LOOPBACK,
    data: Data = None,
) -> None:
    """Run orchestrator, judge and, with --engine, its agent in one process, as `up` does where there is one engine."""
    from clawloop.app.processes.workers import run_combined_worker

    asyncio.run(run_combined_worker(engine, _logging_settings(data), health_port, restart_command, health_host))


@worker_app.command()
def trainer(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model, as for `up`; CLAWLOOP_MODEL.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The name by which engines serve it; default: the folder's name.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Compute the steps of this pool's policies.")] = "default",
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine, one for each GPU.")] = 1,
    ranks: Annotated[
        RankWeights,
        typer.Option(help="Whether each rank holds the whole base model, or a share of it (FSDP)."),
    ] = "sharded",
    device: Annotated[Device | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: bfloat16 on a GPU, the model's own on a CPU.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest sample; longer ones are dropped. Default: the model's context.")
    ] = None,
    micro_batch_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of one forward pass; fewer need less memory. Half as many for samples that share a prefix "
            "with a long one.",
        ),
    ] = 8192,
    recompute_beyond: Annotated[
        int,
        typer.Option(
            min=0,
            help="Layers of a micro-batch of more tokens are computed again in the backward pass: less memory, more "
            "time. For torchtune.",
        ),
    ] = 0,
    backend: Annotated[
        Backend | None,
        typer.Option(help="The library that computes the model. Default: torchtune for what it supports."),
    ] = None,
    quantise: Quantised = None,
    engines_quantised: Annotated[
        bool,
        typer.Option(
            "--engines-quantised", help="Engines serve a quantised copy; the recipe needs a decoupled correction."
        ),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch on the CPU; default: a core each.")] = None,
    health_port: HealthPort = 0,
    health_host: HealthHost = LOOPBACK,
    data: Data = None,
) -> None:
    """Compute training steps; one process for each pool."""
    from clawloop.app.processes.trainer import TrainerProcess, run_trainer
    from clawloop.core.telemetry.logs import configure_logging
    from clawloop.training.setup import TrainerSetup

    settings = settings_of(data)
    base = model or settings.model
    if base is None:
        raise SetupError("no model to train: give --model MODEL, or set CLAWLOOP_MODEL")
    setup = TrainerSetup(
        model=model_folder(base, settings.data / "models").resolve(),
        adapters=(settings.data / "adapters").resolve(),
        base_model=base_model,
        device=None if device is None else device.value,
        dtype=dtype,
        max_tokens=max_tokens,
        micro_batch_tokens=micro_batch_tokens,
        recompute_beyond=recompute_beyond,
        backend=backend,
        quantise=quantise,
        engines_quantised=engines_quantised,
        threads=threads,
        ranks=ranks,
        kept_free_bytes=settings.min_free_disk_bytes,
    )
    configure_logging(secrets=settings.secrets)
    process = TrainerProcess(setup=setup, pool=pool, nproc=nproc, health_port=health_port, health_host=health_host)
    run_trainer(process, settings)


@worker_app.command()
def engine(
    engine: Annotated[str, _ENGINE],
    restart_command: RestartCommand = None,
    health_port: HealthPort = 0,
    health_host: HealthHost = LOOPBACK,
    data: Data = None,
) -> None:
    """Load and unload versions in one engine, and reload them after a restart; one process beside each engine."""
    from clawloop.app.processes.engine_agent import run_agent

    asyncio.run(run_agent(engine, _logging_settings(data), health_port, restart_command, health_host))


@worker_app.command()
def environment(
    environment: Annotated[
        list[str] | None,
        typer.Option(
            help="An environment to run, repeatable. Default: tool-call, terminal and swe, or those of --tasks."
        ),
    ] = None,
    tasks: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of Harbor task directories, an environment of its name; repeatable."),
    ] = None,
    gateway: Annotated[
        str, typer.Option(help="The gateway's URL, the only address that sandboxes reach.")
    ] = "http://127.0.0.1:30000",
    harness: Annotated[
        str | None,
        typer.Option(help="A shell command that plays the agent instead of our own loop; the task: /task/prompt.txt."),
    ] = None,
    harness_folder: Annotated[
        Path | None, typer.Option(help="What the harness needs: a folder that the sandbox sees as /agent, read-only.")
    ] = None,
    chromium: Annotated[
        Path | None, typer.Option(help="Chromium for the environment browser. Default: fetched, else the system's.")
    ] = None,
    screenshots: Annotated[
        bool, typer.Option("--screenshots", help="In browser: with each page its picture; such turns are not trained.")
    ] = False,
    kinds: Annotated[
        str | None,
        typer.Option(help="In browser: the kinds of its tasks, such as press,write; the same in all workers."),
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(help="A variable of this process that tasks may ask for by ${NAME}; repeatable."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Sandboxes at a time, for each environment.")] = 8,
    health_port: HealthPort = 0,
    health_host: HealthHost = LOOPBACK,
    data: Data = None,
) -> None:
    """Run episodes and their verifiers in sandboxes on this machine; any number of processes."""
    from clawloop.app.processes.environment import run_environment_worker
    from clawloop.environments.choice import DEFAULT_ENVIRONMENTS, BrowserOptions
    from clawloop.environments.task import CommandHarness

    if harness is None and harness_folder is not None:
        raise SetupError("--harness-folder: give --harness too")
    settings = _logging_settings(data)
    chosen = environment or ([] if tasks else list(DEFAULT_ENVIRONMENTS))
    brought = None if harness is None else CommandHarness(harness, harness_folder)
    health = (health_host, health_port)
    browser = BrowserOptions(chromium, screenshots, () if kinds is None else kinds.split(","))
    asyncio.run(
        run_environment_worker(
            chosen, tasks or [], gateway, episodes, settings, health, brought, browser, variable or []
        )
    )


def _logging_settings(data: Path | None) -> Settings:
    """The settings; from now on the process logs without their secrets."""
    from clawloop.core.telemetry.logs import configure_logging

    settings = settings_of(data)
    configure_logging(secrets=settings.secrets)
    return settings
