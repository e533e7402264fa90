"""A program for test_demo_command.py: `clawloop demo` with real PostgreSQL and Temporal, but without a model.

`python demo_with_fakes.py ENGINE_URL MODEL run OPTIONS…`. The gateway is the scripted one; the engine only serves
its model name.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from clawloop.app.cli.demo import run_command
from clawloop.app.cli.up import prepare_deployment
from clawloop.app.demo import run as demo_run
from clawloop.app.local import parts, up
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
from clawloop.app.local.supervision.supervisor import Launch, Part
from clawloop.core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
real_gateways = parts.gateways


def gateways(deployment: Deployment, listener: socket.socket, count: int, environment: Mapping[str, str]) -> list[Part]:
    """One: its script is in its memory."""
    (real,) = real_gateways(deployment, listener, 1, environment)
    command = (sys.executable, "-m", "tests.fakes.scripted_gateway", str(listener.fileno()))
    launch = Launch(command, real.prepare().environment, ROOT, pass_fds=(listener.fileno(),))
    return [replace(real, prepare=lambda: launch, is_ready=lambda: parts.answers_ok(f"{real.address}/healthz"))]


async def run_up(options: UpOptions, *given: Any, **named: Any) -> None:
    await up.run(replace(options, engines=(sys.argv[1],)), *given, **named)


app = typer.Typer()
app.callback()(lambda: None)  # so that `run` is a verb
app.command("run")(run_command(Settings, lambda: prepare_deployment))

if __name__ == "__main__":
    parts.gateways = gateways
    parts.workers = lambda *_: []
    demo_run.run_up = run_up  # type: ignore[attr-defined]
    demo_run.CHAT_MODEL = Path(sys.argv[2])  # type: ignore[attr-defined]
    app(sys.argv[3:])
