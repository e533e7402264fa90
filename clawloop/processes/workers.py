"""The workers put together: orchestrator (workflows, ledger) and judge.

Knows nothing about how they are supervised. A worker waits for Temporal; PostgreSQL and judges may come and go.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from enum import StrEnum
from typing import TypeAlias

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.judging.closing import LedgerActivities
from activities.judging.judge_turn import JudgingActivities
from activities.serving.publishing import PublishingActivities
from activities.serving.reconcile import EngineReconciler
from activities.serving.retention import Retention
from activities.sweep import SweepActivities
from activities.training.notifier import TrainingNotifier
from activities.training.ports import WorkNotifier
from activities.training.steps import StepActivities
from clawloop.adapters.folder import AdapterFolder
from clawloop.errors import SetupError, SignalFailed, StoreUnavailable, TrainerUnavailable
from clawloop.judging.prompts import AnswerForm
from clawloop.processes.endpoints import database_url, temporal_address
from clawloop.serving.directory import DirectoryCache, DirectoryStore
from clawloop.serving.endpoints import Endpoint, Endpoints
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rendering import EngineRenderer
from clawloop.settings import Settings
from clawloop.telemetry.metrics import WorkerMetrics
from clawloop.temporal.client import TemporalSessionNotifier, begin_sweeping, connect, register_search_attributes
from clawloop.temporal.engine_notifier import TemporalEngineNotifier
from clawloop.temporal.training_notifier import TemporalTrainingNotifier
from db.database import BACKGROUND_LIMIT, Database
from db.judging.closing import PostgresClosingStore
from db.judging.judgements import PostgresJudgementStore
from db.serving.directory import PostgresDirectoryStore
from db.serving.publishing import PostgresPublishingStore
from db.sweep import PostgresSweepStore
from db.training.queue import PostgresWorkStore
from db.training.steps import PostgresStepStore
from workflows import names
from workflows.engine import EngineWorkflow
from workflows.session import SessionWorkflow
from workflows.sweep import SweepWorkflow
from workflows.training import TrainingWorkflow

log = logging.getLogger(__name__)

# How often Temporal is tried while it is away.
RETRY_SECONDS = 2.0
# `clawloop up` promises to end within 15 s; a judging cut short goes on elsewhere with the votes it stored.
GRACE = timedelta(seconds=2)
# A judgement holds little memory while it waits for its judge, and the judge's client asks for 8 at once.
JUDGEMENTS_AT_ONCE = 16


class Role(StrEnum):
    ORCHESTRATOR = "orchestrator"
    JUDGE = "judge"


Workers: TypeAlias = Callable[[Client, AsyncExitStack], Awaitable[list[Worker]]]
"""Puts a process's workers together, once Temporal answers; what they need is closed with the stack."""


async def run_worker(role: Role, settings: Settings, health_port: int) -> None:
    """Work until asked to stop.

    Args:
        health_port: loopback port of `/healthz`, `/readyz` and `/metrics`; 0 serves none.

    Raises:
        SetupError: no database or no Temporal is given.
    """
    url = database_url(settings)
    metrics = WorkerMetrics()

    async def workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        if role is Role.ORCHESTRATOR:
            await _notify_temporal(client)
        return await _workers(role, settings, url, client, metrics, stack)

    await serve(role, settings, workers, health_port, registry=metrics.registry)


async def serve(
    name: str,
    settings: Settings,
    workers: Workers,
    health_port: int,
    *,
    registry: CollectorRegistry | None = None,
    broken: asyncio.Event | None = None,
) -> None:
    """Run workers until asked to stop, or until they say that they cannot go on.

    Args:
        registry: what `/metrics` shows; without one there is no such route.
        broken: set by workers that cannot go on.

    Raises:
        SetupError: no Temporal is given.
        TrainerUnavailable: `broken` was set.
    """
    address = temporal_address(settings)
    if address is None:
        raise SetupError("no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal")
    stop, broken = asyncio.Event(), broken or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        ready = await stack.enter_async_context(_health(health_port, registry))
        working = asyncio.create_task(_work(name, address, workers, ready))
        ending = [asyncio.create_task(event.wait()) for event in (stop, broken)]
        await asyncio.wait({working, *ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, *ending):
            task.cancel()
        try:
            await working
        except asyncio.CancelledError:
            log.info("worker stopped", extra={"role": name})
    if broken.is_set():
        raise TrainerUnavailable(f"the {name} cannot go on and must be started anew; its log says why")


async def _work(name: str, address: str, workers: Workers, ready: asyncio.Event) -> None:
    """Ends only by raising or by being cancelled."""
    async with AsyncExitStack() as stack:
        for worker in await _when_temporal_answers(address, workers, stack):
            await stack.enter_async_context(worker)
        log.info("worker runs", extra={"role": name})
        ready.set()
        await asyncio.Event().wait()


async def _when_temporal_answers(address: str, workers: Workers, stack: AsyncExitStack) -> list[Worker]:
    told = False
    while True:
        try:
            return await workers(await connect(address), stack)
        except (RPCError, RuntimeError) as error:
            if not told:
                log.warning("Temporal does not answer yet", extra={"why": " ".join(str(error).split())})
                told = True
            await asyncio.sleep(RETRY_SECONDS)


async def _notify_temporal(client: Client) -> None:
    """What Temporal must know before there are workflows."""
    await register_search_attributes(client)
    await begin_sweeping(client)


async def _workers(
    role: Role, settings: Settings, url: str, client: Client, metrics: WorkerMetrics, stack: AsyncExitStack
) -> list[Worker]:
    database = Database(url, BACKGROUND_LIMIT)
    stack.push_async_callback(database.close)
    judgements = PostgresJudgementStore(database)
    work = TrainingNotifier(PostgresWorkStore(database), TemporalTrainingNotifier(client))
    if role is Role.JUDGE:
        directory = await stack.enter_async_context(DirectoryCache(PostgresDirectoryStore(database)))
        engines = _engines(directory)
        judge = await stack.enter_async_context(_judge(settings, engines, metrics))
        renderer = await stack.enter_async_context(EngineRenderer(engines))
        judging = JudgingActivities(judgements, judge, renderer, work, metrics)
        return [
            Worker(
                client,
                task_queue=names.JUDGE_QUEUE,
                activities=[judging.judge_turn, judging.collect_direct_vote],
                max_concurrent_activities=JUDGEMENTS_AT_ONCE,
                graceful_shutdown_timeout=GRACE,
            )
        ]
    beginning = asyncio.create_task(_begin_learning(PostgresDirectoryStore(database), TemporalTrainingNotifier(client)))
    stack.callback(beginning.cancel)
    idle = timedelta(minutes=settings.session_idle_minutes)
    step_store, publishing_store = PostgresStepStore(database), PostgresPublishingStore(database)
    retention = Retention(publishing_store, AdapterFolder(settings.data / "adapters"))
    notifier = TemporalSessionNotifier(client, idle)
    engine_workflows = TemporalEngineNotifier(client)
    reconciler = EngineReconciler(publishing_store, engine_workflows)
    sweeper = SweepActivities(
        PostgresSweepStore(database), notifier, work, idle, retention=retention, reconciler=reconciler, counter=metrics
    )
    ledger = LedgerActivities(PostgresClosingStore(database), judgements, work, metrics)
    steps = StepActivities(step_store)
    publishing = PublishingActivities(publishing_store, step_store, engine_workflows)
    return [
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=[SessionWorkflow, SweepWorkflow, TrainingWorkflow, EngineWorkflow],
            graceful_shutdown_timeout=GRACE,
        ),
        Worker(
            client,
            task_queue=names.LEDGER_QUEUE,
            activities=[
                ledger.close_session,
                sweeper.sweep,
                steps.look_at_training,
                steps.claim_batch,
                steps.quarantine_step,
                steps.abandon_step,
                publishing.publish_version,
            ],
            max_concurrent_activities=JUDGEMENTS_AT_ONCE,
            graceful_shutdown_timeout=GRACE,
        ),
    ]


async def _begin_learning(directory: DirectoryStore, notifier: WorkNotifier) -> None:
    """See that each policy's training workflow runs and looks around; engines' agents begin those of engines."""
    while True:
        try:
            for policy in (await directory.read()).policies:
                await notifier.notify_work(policy.id)
            return
        except (StoreUnavailable, SignalFailed) as error:
            log.warning("learning is not begun yet", extra={"why": str(error)})
            await asyncio.sleep(RETRY_SECONDS)


def _engines(directory: DirectoryCache) -> Endpoints:
    """Our own engines under the policy's base name."""

    def endpoints(policy_id: str) -> list[Endpoint]:
        names = [policy.base_model for policy in directory.snapshot.policies if policy.id == policy_id]
        return [
            Endpoint(engine.url, name) for name in names for engine in directory.snapshot.engines if not engine.draining
        ]

    return endpoints


def _judge(settings: Settings, engines: Endpoints, metrics: WorkerMetrics) -> JudgeClient:
    if settings.judge_url is None:
        return JudgeClient(engines, AnswerForm(settings.judge_form or AnswerForm.GRAMMAR), clock=metrics)
    if settings.judge_model is None:
        raise SetupError("CLAWLOOP_JUDGE_URL is set: say which model to ask for, CLAWLOOP_JUDGE_MODEL")
    key = None if settings.judge_api_key is None else settings.judge_api_key.get_secret_value()
    endpoint = Endpoint(settings.judge_url.rstrip("/").removesuffix("/v1"), settings.judge_model, key)
    return JudgeClient(lambda policy: [endpoint], AnswerForm(settings.judge_form or AnswerForm.FREE), clock=metrics)


@asynccontextmanager
async def _health(port: int, registry: CollectorRegistry | None) -> AsyncIterator[asyncio.Event]:
    """Says that this process runs, and once the event is set, that it works."""
    ready = asyncio.Event()

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(request: web.Request) -> web.Response:
        if ready.is_set():
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready"}, status=503)

    async def metrics(request: web.Request) -> web.Response:
        assert registry is not None
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    if port == 0:
        yield ready
        return
    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    if registry is not None:
        app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield ready
    finally:
        await runner.cleanup()
