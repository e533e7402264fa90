"""`clawloop worker`: what does the work that Temporal hands out.

Imports what is heavy only when a verb runs; torch only for the trainer.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.processes.workers import Role
    from clawloop.settings import Settings

worker_app = typer.Typer(no_args_is_help=True, help="Do what Temporal hands out.")

Data = Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")]
HealthPort = Annotated[int, typer.Option(help="Loopback port of /healthz, /readyz and /metrics; 0 serves none.")]


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@worker_app.callback()
def worker() -> None:
    """Do what Temporal hands out."""


@worker_app.command()
def orchestrator(health_port: HealthPort = 0, data: Data = None) -> None:
    """Sessions' workflows, the ledger, the sweep; as many as you like."""
    from clawloop.processes.workers import Role

    _run(Role.ORCHESTRATOR, health_port, data)


@worker_app.command()
def judge(health_port: HealthPort = 0, data: Data = None) -> None:
    """Asks the judge, decides, makes samples; as many as you like."""
    from clawloop.processes.workers import Role

    _run(Role.JUDGE, health_port, data)


@worker_app.command()
def trainer(
    model: Annotated[Path | None, typer.Option(help="Folder of the base model; CLAWLOOP_MODEL.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The name by which engines serve it; the folder's name if left out.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Takes the steps of this pool's policies.")] = "default",
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine, one for each GPU.")] = 1,
    device: Annotated[Device | None, typer.Option(help="A GPU if there is one, if left out.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="bfloat16 on a GPU, the model's own on a CPU, if left out.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest sample; longer ones are left out. The model's own if left out.")
    ] = None,
    micro_batch_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens read at once; fewer need less memory. Beside a long sample, half as many of those that share "
            "its beginning.",
        ),
    ] = 8192,
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch on the CPU; half the cores if left out.")] = None,
    health_port: Annotated[
        int, typer.Option(help="Loopback port of /healthz, /readyz and /metrics; 0 serves none.")
    ] = 0,
    data: Data = None,
) -> None:
    """Takes training steps; one for each pool."""
    from clawloop.processes.trainer import TrainerProcess, run_trainer
    from clawloop.telemetry.logs import configure_logging
    from clawloop.training.setup import TrainerSetup

    settings = _settings(data)
    folder = model or settings.model
    if folder is None:
        raise SetupError("no model to train: give --model DIR, or set CLAWLOOP_MODEL")
    setup = TrainerSetup(
        model=folder.resolve(),
        adapters=(settings.data / "adapters").resolve(),
        base_model=base_model,
        device=None if device is None else device.value,
        dtype=None if dtype is None else dtype.value,
        max_tokens=max_tokens,
        micro_batch_tokens=micro_batch_tokens,
        threads=threads,
    )
    configure_logging()
    run_trainer(TrainerProcess(setup=setup, pool=pool, nproc=nproc, health_port=health_port), settings)


@worker_app.command()
def engine(
    engine: Annotated[str, typer.Option(help="The vLLM beside it: its id, as `engine list` shows it, or its URL.")],
    restart_command: Annotated[
        str | None, typer.Option(help="Run when the engine is dead; leave out where something else restarts it.")
    ] = None,
    health_port: Annotated[
        int, typer.Option(help="Loopback port of /healthz, /readyz and /metrics; 0 serves none.")
    ] = 0,
    data: Data = None,
) -> None:
    """Loads and unloads versions in its engine, and refills it after a restart; one beside each engine."""
    from clawloop.processes.engine_agent import run_agent
    from clawloop.telemetry.logs import configure_logging

    configure_logging()
    asyncio.run(run_agent(engine, _settings(data), health_port, restart_command))


def _run(role: Role, health_port: int, data: Path | None) -> None:
    from clawloop.processes.workers import run_worker
    from clawloop.telemetry.logs import configure_logging

    configure_logging()
    asyncio.run(run_worker(role, _settings(data), health_port))


def _settings(data: Path | None) -> Settings:
    from clawloop.settings import read_settings

    settings = read_settings()
    return settings if data is None else settings.model_copy(update={"data": data})
