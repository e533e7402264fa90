"""Runs the Temporal workers of a process: connects, serves health and metrics, and stops on a signal.

The process waits for Temporal at its start, and retries.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from clawloop.app.temporal.plugin import connect
from clawloop.core.crash_points import arm_crash_points
from clawloop.core.errors import SetupError, TrainerUnavailable
from clawloop.core.host_names import hostname, is_answered
from clawloop.core.telemetry.logs import log_role
from clawloop.core.telemetry.tracing import tracing

log = logging.getLogger(__name__)

# Between attempts while Temporal, or the database at the start, does not answer.
RETRY_SECONDS = 2.0
# `clawloop up` promises to stop within 20 s; a cancelled judging activity is retried and reuses its stored votes.
GRACE = timedelta(seconds=2)
LOOPBACK = "127.0.0.1"

CreateWorkers: TypeAlias = Callable[[Client, AsyncExitStack], Awaitable[list[Worker]]]
"""Creates a role's workers, once Temporal answers; the stack closes what they use."""


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """One of the things that a process does, with workers, metrics and readiness of its own.

    Args:
        name: for logs, errors and the path of its metrics.
        broken: set by a worker that needs a new process.
    """

    name: str
    create_workers: CreateWorkers
    registry: CollectorRegistry
    broken: asyncio.Event = field(default_factory=asyncio.Event)


async def run_workers(
    name: str,
    address: str,
    roles: Sequence[WorkerRole],
    health_port: int,
    *,
    health_host: str = LOOPBACK,
    crash_points: Path | None = None,
) -> None:
    """Run the workers of all roles until SIGINT or SIGTERM, or until one of the roles ends or is broken.

    Args:
        name: of the process, for its traces.
        address: of Temporal.
        health_port: of `/healthz`, `/readyz` and `/metrics`; 0 serves none. Of several roles each has its own metrics,
            at `/metrics/ROLE`.
        health_host: the address they are served on.
        crash_points: the folder of `clawloop.core.crash_points`, for tests.

    Raises:
        TrainerUnavailable: a role is broken.
        SetupError: what a role needs is missing or unusable; of several roles it names the one.
    """
    arm_crash_points(crash_points)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing(f"clawloop-{name}"))
        ready = {role.name: asyncio.Event() for role in roles}
        await stack.enter_async_context(_health(health_host, health_port, roles, ready))
        is_alone = len(roles) == 1
        working = [asyncio.create_task(_run(role, address, ready[role.name], is_alone=is_alone)) for role in roles]
        ending = [asyncio.create_task(event.wait()) for event in (stop, *(role.broken for role in roles))]
        await asyncio.wait({*working, *ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*working, *ending):
            task.cancel()
        await asyncio.wait(working)
        for task in working:
            if not task.cancelled():
                task.result()
        log.info("worker stopped", extra={"role": name})
    for role in roles:
        if role.broken.is_set():
            raise TrainerUnavailable(f"the {role.name} must be restarted; its log has the reason")


async def _run(role: WorkerRole, address: str, ready: asyncio.Event, *, is_alone: bool) -> None:
    """Run the role's workers; ends only by an exception or by cancellation."""
    if not is_alone:
        log_role.set(role.name)  # also for all tasks that are begun from here
    try:
        async with AsyncExitStack() as stack:
            for worker in await _connect_and_create(address, role.create_workers, stack):
                await stack.enter_async_context(worker)
            log.info("worker runs", extra={"role": role.name})
            ready.set()
            await asyncio.Event().wait()
    except SetupError as error:
        raise error if is_alone else SetupError(f"{role.name}: {error}") from error


async def _connect_and_create(address: str, create_workers: CreateWorkers, stack: AsyncExitStack) -> list[Worker]:
    """Retry until Temporal answers."""
    logged = False
    while True:
        try:
            return await create_workers(await connect(address), stack)
        except (RPCError, RuntimeError) as error:
            if not logged:
                log.warning("Temporal does not answer yet", extra={"why": " ".join(str(error).split())})
                logged = True
            await asyncio.sleep(RETRY_SECONDS)


@web.middleware
async def _check_host(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not is_answered(hostname(f"//{hosts[0]}")):
        return web.json_response({"status": "only addresses and loopback names are answered"}, status=421)
    return await handler(request)


@asynccontextmanager
async def _health(
    host: str, port: int, roles: Sequence[WorkerRole], ready: Mapping[str, asyncio.Event]
) -> AsyncIterator[None]:
    """Serve health and metrics; `/readyz` answers 200 once every role's event is set."""

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(request: web.Request) -> web.Response:
        waiting = [name for name, event in ready.items() if not event.is_set()]
        if not waiting:
            return web.json_response({"status": "ready"})
        named = {} if len(roles) == 1 else {"roles": waiting}
        return web.json_response({"status": "not ready"} | named, status=503)

    def page(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        return metrics

    if port == 0:
        yield
        return
    app = web.Application(middlewares=[_check_host])
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    paths = ["/metrics"] if len(roles) == 1 else [f"/metrics/{role.name}" for role in roles]
    app.add_routes([web.get(path, page(role.registry)) for path, role in zip(paths, roles, strict=True)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
