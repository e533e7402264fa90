"""`clawloop worker`: what does the work that Temporal hands out.

Imports what is heavy only when a verb runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clawloop.settings import Settings
    from clawloop.workers import Role

worker_app = typer.Typer(no_args_is_help=True, help="Do what Temporal hands out.")

Data = Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")]
HealthPort = Annotated[int, typer.Option(help="Loopback port of /healthz and /readyz; 0 serves none.")]


@worker_app.callback()
def worker() -> None:
    """Do what Temporal hands out."""


@worker_app.command()
def orchestrator(health_port: HealthPort = 0, data: Data = None) -> None:
    """Sessions' workflows, the ledger, the sweep; as many as you like."""
    from clawloop.workers import Role

    _run(Role.ORCHESTRATOR, health_port, data)


@worker_app.command()
def judge(health_port: HealthPort = 0, data: Data = None) -> None:
    """Asks the judge, decides, makes samples; as many as you like."""
    from clawloop.workers import Role

    _run(Role.JUDGE, health_port, data)


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
    from clawloop.engine_agent import run_agent
    from clawloop.telemetry import configure_logging

    configure_logging()
    asyncio.run(run_agent(engine, _settings(data), health_port, restart_command))


def _run(role: Role, health_port: int, data: Path | None) -> None:
    from clawloop.telemetry import configure_logging
    from clawloop.workers import run_worker

    configure_logging()
    asyncio.run(run_worker(role, _settings(data), health_port))


def _settings(data: Path | None) -> Settings:
    from clawloop.settings import Settings

    settings = Settings()
    return settings if data is None else settings.model_copy(update={"data": data})
