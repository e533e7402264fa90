"""Runs the Temporal workers of one process: connects, serves health and metrics, and stops on a signal.

The process waits for Temporal at its start, and retries.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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
from clawloop.core.errors import TrainerUnavailable
from clawloop.core.host_names import hostname, is_answered
from clawloop.core.telemetry.tracing import tracing

log = logging.getLogger(__name__)

# Between attempts while Temporal, or the database at the start, does not answer.
RETRY_SECONDS = 2.0
# `clawloop up` promises to stop within 20 s; a cancelled judging activity is retried and reuses its stored votes.
GRACE = timedelta(seconds=2)
LOOPBACK = "127.0.0.1"

CreateWorkers: TypeAlias = Callable[[Client, AsyncExitStack], Awaitable[list[Worker]]]
"""Creates a process's workers, once Temporal answers; the stack closes what they use."""


async def run_workers(
    name: str,
    address: str,
    create_workers: CreateWorkers,
    health_port: int,
    *,
    health_host: str = LOOPBACK,
    registry: CollectorRegistry,
    broken: asyncio.Event | None = None,
    crash_points: Path | None = None,
) -> None:
    """Run Temporal workers until SIGINT or SIGTERM, or until `broken` is set.

    Args:
        name: for logs and errors.
        address: of Temporal.
        health_port: of `/healthz`, `/readyz` and `/metrics`; 0 serves none.
        health_host: the address they are served on.
        registry: metrics of `/metrics`.
        broken: set by a worker that needs a new process.
        crash_points: the folder of `clawloop.core.crash_points`, for tests.

    Raises:
        TrainerUnavailable: `broken` was set.
    """
    arm_crash_points(crash_points)
    stop, broken = asyncio.Event(), broken or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing(f"clawloop-{name}"))
        ready = await stack.enter_async_context(_health(health_host, health_port, registry))
        working = asyncio.create_task(_run(name, address, create_workers, ready))
        ending = [asyncio.create_task(event.wait()) for event in (stop, broken)]
        await asyncio.wait({working, *ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, *ending):
            task.cancel()
        try:
            await working
        except asyncio.CancelledError:
            log.info("worker stopped", extra={"role": name})
    if broken.is_set():
        raise TrainerUnavailable(f"the {name} must be restarted; its log has the reason")


async def _run(name: str, address: str, create_workers: CreateWorkers, ready: asyncio.Event) -> None:
    """Run the workers; ends only by an exception or by cancellation."""
    async with AsyncExitStack() as stack:
        for worker in await _connect_and_create(address, create_workers, stack):
            await stack.enter_async_context(worker)
        log.info("worker runs", extra={"role": name})
        ready.set()
        await asyncio.Event().wait()


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
async def _health(host: str, port: int, registry: CollectorRegistry) -> AsyncIterator[asyncio.Event]:
    """Serve health and metrics; `/readyz` answers 200 once the yielded event is set."""
    ready = asyncio.Event()

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(request: web.Request) -> web.Response:
        if ready.is_set():
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready"}, status=503)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    if port == 0:
        yield ready
        return
    app = web.Application(middlewares=[_check_host])
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield ready
    finally:
        await runner.cleanup()
