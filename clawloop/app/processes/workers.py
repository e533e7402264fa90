"""Assembles the workers of the orchestrator (workflows, ledger activities) and of the judge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from functools import partial

from temporalio.client import Client
from temporalio.worker import Worker

from activities.episodes import EpisodeLedgerActivities, EpisodeUpkeep
from activities.judging.closing import ClosingActivities
from activities.judging.episode_votes import EpisodeJudgingActivities
from activities.judging.judge_turn import JudgingActivities
from activities.notify import TrainingNotifier
from activities.practice import PracticeActivities
from activities.serving.engines import EngineReconciler
from activities.serving.publishing import PublishingActivities
from activities.serving.retention import Retention
from activities.sweep import SweepActivities
from activities.training.gate import Canaries, GateActivities
from activities.training.probe_version import ProbeActivities
from activities.training.steps import StepActivities
from api.chat.practice import PracticeClient
from clawloop.app.processes.database import ready_database, require_database
from clawloop.app.processes.endpoints import engine_secret, required_temporal_address
from clawloop.app.processes.engine_agent import agent_role
from clawloop.app.processes.holding import Holding
from clawloop.app.processes.worker_process import GRACE, LOOPBACK, RETRY_SECONDS, WorkerRole, run_workers
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.replay import POLLS, replaying_few_at_once
from clawloop.app.temporal.server import prepare_namespace
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.contracts.notices import BatchWaits, Notifier
from clawloop.core.contracts.serving import Directory, Policy
from clawloop.core.errors import (
    JudgeRefused,
    JudgeUnavailable,
    RecipeRejected,
    RecordUnusable,
    SetupError,
    SignalFailed,
    StoreUnavailable,
)
from clawloop.core.gate.general import KNOWN_TEMPERATURE
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import Settings
from clawloop.core.telemetry.metrics import WorkerMetrics
from clawloop.operations.judge_trial import try_judge
from clawloop.serving.directory import DirectoryCache
from clawloop.serving.endpoints import Endpoint, Endpoints
from clawloop.serving.judge import JudgeClient, ReadPictures, ReadTrial
from clawloop.serving.probes import ProbeClient
from clawloop.serving.rendering import EngineRenderer, ThinkingProbe
from db.database import Database
from db.episodes.groups import PostgresEpisodeStore
from db.episodes.rollouts import PostgresRolloutStore
from db.judging.closing import PostgresClosingStore
from db.judging.judgements import PostgresJudgementStore
from db.judging.rewards import PostgresJudgeSampleStore
from db.judging.trials import PostgresTrialStore
from db.lessons.practice import PostgresPracticeStore
from db.serving.directory import PostgresDirectoryStore
from db.serving.publishing import PostgresPublishingStore
from db.sweep import PostgresSweepStore
from db.temporal_server import TemporalServerStore
from db.training.gate import PostgresCanaryStore, PostgresGateStore
from db.training.probes import PostgresProbeStore
from db.training.recipes import read_recipe_of
from db.training.steps import PostgresStepStore
from db.training.work_flag import PostgresWorkStore
from db.turns.files import PostgresFileStore
from db.turns.read import ConversationCache
from workflows import names
from workflows.registered import WORKFLOWS

# The judge ------------------------------------------------------------------------------------------------------------
# The judge of the settings: CLAWLOOP_JUDGE_URL, or the base model on the engines.


def engine_endpoints(settings: Settings, directory: Callable[[], Directory]) -> Endpoints:
    """The engines that are not draining, with the name of the policy's base model, and their secret."""
    secret = engine_secret(settings)

    def endpoints(policy_id: str) -> list[Endpoint]:
        now = directory()
        names = [policy.base_model for policy in now.policies if policy.id == policy_id]
        return [Endpoint(engine.url, name, secret()) for name in names for engine in now.engines if not engine.draining]

    return endpoints


def judge_client(
    settings: Settings,
    directory: Callable[[], Directory],
    clock: WorkerMetrics | None = None,
    pictures: ReadPictures | None = None,
    trials: ReadTrial | None = None,
) -> JudgeClient:
    """
    Args:
        pictures: of the evidence; read only if CLAWLOOP_JUDGE_IMAGES says that the judge sees.
        trials: see `JudgeClient`.

    Raises:
        SetupError: CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not.
    """
    seen = pictures if settings.judge_images else None
    if settings.judge_url is None:
        endpoints = engine_endpoints(settings, directory)
        return JudgeClient(endpoints, judge_form(settings), with_chats=True, clock=clock, pictures=seen, trials=trials)
    if settings.judge_model is None:
        raise SetupError("CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not: set it to the model's name there")
    key = None if settings.judge_api_key is None else settings.judge_api_key.get_secret_value()
    endpoint = Endpoint(settings.judge_url.rstrip("/").removesuffix("/v1"), settings.judge_model, key)
    return JudgeClient(lambda policy: [endpoint], judge_form(settings), clock=clock, pictures=seen, trials=trials)


def judge_form(settings: Settings) -> AnswerForm | None:
    """The form of answers that the settings prescribe; None: the judge's trial decides."""
    form = settings.judge_form or ("auto" if settings.judge_url is None else "free")
    return None if form == "auto" else AnswerForm(form)


# Workers --------------------------------------------------------------------------------------------------------------
# Assembles the workers of the orchestrator (workflows, ledger activities) and of the judge, and runs them in processes
# of their own or, beside an engine's agent, in one: each role has its own connections to PostgreSQL and Temporal.
#
# PostgreSQL and judges may be unavailable at the start and later: activities are retried.

log = logging.getLogger(__name__)

# A judgement needs little memory while it waits for its judge, whose client sends 8 requests at a time.
MAX_CONCURRENT_ACTIVITIES = 16
# After this time any orchestrator may take a workflow task, not only the one that caches the workflow: that one was
# killed, or lost the task. The default of 10 s would be added to the time from a step to its version's first reply.
STICKY_SECONDS = timedelta(seconds=5)


class Role(StrEnum):
    ORCHESTRATOR = "orchestrator"
    JUDGE = "judge"


async def run_worker(role: Role, settings: Settings, health_port: int, health_host: str = LOOPBACK) -> None:
    """Run the role's workers until SIGINT or SIGTERM.

    Args:
        health_port, health_host: as for `run_workers`.

    Raises:
        SetupError: no database or no Temporal is configured, or another Temporal server has the database.
        TrainerUnavailable: another Temporal server took the database meanwhile.
    """
    await _run_roles(role, [_role(role, settings)], settings, health_port, health_host)


async def run_combined_worker(
    engine: str | None,
    settings: Settings,
    health_port: int,
    restart_command: str | None = None,
    health_host: str = LOOPBACK,
) -> None:
    """Run orchestrator, judge and an engine's agent in this process, until SIGINT or SIGTERM; one's end ends all.

    Args:
        engine: its id or URL; None: without an agent.
        restart_command: as for `run_agent`.

    Raises:
        SetupError, TrainerUnavailable: as for `run_worker` and `run_agent`.
    """
    roles = [_role(role, settings) for role in Role]
    if engine is not None:
        # Named as `clawloop up` names an agent's process: here is one alone, and an engine's id is no path.
        roles.append(replace(agent_role(engine, settings, restart_command), name="engine-agent"))
    await _run_roles("combined-worker", roles, settings, health_port, health_host)


async def _run_roles(
    name: str, roles: Sequence[WorkerRole], settings: Settings, health_port: int, health_host: str
) -> None:
    require_database(settings)
    await run_workers(
        name,
        required_temporal_address(settings),
        roles,
        health_port,
        health_host=health_host,
        crash_points=settings.crash_points,
    )


def _role(role: Role, settings: Settings) -> WorkerRole:
    metrics = WorkerMetrics()
    broken = asyncio.Event()

    async def create_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = await ready_database(settings, stack)
        if role is Role.ORCHESTRATOR:
            await _hold(settings, database, client, broken, stack)
            return _orchestrator_workers(settings, database, client, metrics)
        return [await _judge_worker(settings, database, client, metrics, stack)]

    return WorkerRole(role, create_workers, metrics.registry, broken)


async def _hold(
    settings: Settings, database: Database, client: Client, broken: asyncio.Event, stack: AsyncExitStack
) -> None:
    """Hold the database for the client's server, and have all that the orchestrators need there; also from now on."""
    directory = PostgresDirectoryStore(database)
    notifier = TemporalNotifier.of(client, settings)

    async def prepare() -> None:
        await prepare_namespace(client)
        # Beside the renewals: it retries until PostgreSQL answers.
        starting = asyncio.create_task(_start_training_workflows(directory, notifier))
        stack.callback(starting.cancel)

    holding = Holding(TemporalServerStore(database), client, broken, prepare)
    await holding.begin()
    stack.push_async_callback(holding.end)
    keeping = asyncio.create_task(holding.keep())
    keeping.add_done_callback(partial(end_if_renewals_fail, broken))
    stack.callback(keeping.cancel)


def end_if_renewals_fail(broken: asyncio.Event, task: asyncio.Task[None]) -> None:
    """End the process: without renewals another server could take the database after a minute."""
    if not task.cancelled() and (bug := task.exception()) is not None:
        log.error("the database is no longer held for this Temporal server", exc_info=bug)
        broken.set()


def _orchestrator_workers(
    settings: Settings, database: Database, client: Client, metrics: WorkerMetrics
) -> list[Worker]:
    notifier = TemporalNotifier.of(client, settings)
    work = TrainingNotifier(PostgresWorkStore(database), notifier)
    conversations = ConversationCache(settings.conversation_cache_bytes)
    step_store, publishing_store = PostgresStepStore(database, conversations), PostgresPublishingStore(database)
    episode_store, rollouts = PostgresEpisodeStore(database), PostgresRolloutStore(database)
    canaries = PostgresCanaryStore(database)
    sweeper = SweepActivities(
        PostgresSweepStore(database),
        notifier,
        work,
        timedelta(minutes=settings.session_idle_minutes),
        retention=Retention(
            publishing_store,
            AdapterFolder(settings.data / "adapters"),
            # Before training, which pauses at half of it.
            wanted_free=2 * settings.min_free_disk_bytes,
        ),
        reconciler=EngineReconciler(publishing_store, notifier, notifier.running_engines),
        counter=metrics,
        episodes=EpisodeUpkeep(
            episode_store.end_late_turns,
            rollouts.running,
            notifier,
            PostgresJudgeSampleStore(database).reward_votes,
        ),
        canaries=Canaries(canaries.open, canaries.decide, work),
    )
    judgements = PostgresJudgementStore(database, conversations)
    ledger = ClosingActivities(PostgresClosingStore(database), judgements, work, metrics)
    steps = StepActivities(step_store)
    gate = GateActivities(PostgresGateStore(database))
    publishing = PublishingActivities(publishing_store, step_store, notifier)
    episodes = EpisodeLedgerActivities(episode_store, rollouts.next_groups, work, notifier)
    where_workflows_run = [*steps.where_workflows_run, gate.decide_version, *episodes.where_workflows_run]
    return [
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=WORKFLOWS,
            activities=where_workflows_run,
            no_remote_activities=True,  # those of the queue below
            tuner=replaying_few_at_once(),
            max_concurrent_workflow_task_polls=POLLS,
            sticky_queue_schedule_to_start_timeout=STICKY_SECONDS,
            graceful_shutdown_timeout=GRACE,
        ),
        Worker(
            client,
            task_queue=names.LEDGER_QUEUE,
            activities=[
                ledger.close_session,
                sweeper.sweep,
                steps.quarantine_step,
                steps.abandon_step,
                publishing.publish_version,
                *where_workflows_run,
                episodes.settle_group,
            ],
            max_concurrent_activities=MAX_CONCURRENT_ACTIVITIES,
            graceful_shutdown_timeout=GRACE,
        ),
    ]


async def _judge_worker(
    settings: Settings, database: Database, client: Client, metrics: WorkerMetrics, stack: AsyncExitStack
) -> Worker:
    directory = await stack.enter_async_context(DirectoryCache(PostgresDirectoryStore(database).read))

    def now() -> Directory:
        return directory.snapshot

    pictures, trials = PostgresFileStore(database).of_turn, PostgresTrialStore(database).trial
    judge = await stack.enter_async_context(judge_client(settings, now, metrics, pictures, trials))
    if settings.judge_try and settings.judge_form in (None, "auto"):
        recipe_of = partial(read_recipe_of, database)
        trying = asyncio.create_task(try_new_judge(settings, now, PostgresTrialStore(database), recipe_of))
        stack.callback(trying.cancel)
    renderer = await stack.enter_async_context(EngineRenderer(engine_endpoints(settings, now)))
    work = TrainingNotifier(PostgresWorkStore(database), TemporalNotifier.of(client, settings))
    conversations = ConversationCache(settings.conversation_cache_bytes)
    judgements = PostgresJudgementStore(database, conversations)
    judging = JudgingActivities(judgements, judge, renderer.render, work, metrics)
    stored = PostgresEpisodeStore(database)
    episodes = EpisodeJudgingActivities(
        judgements, stored.waiting_turns, stored.note_verdict, judge, metrics, judge_learns=settings.judge_learns
    )
    engines = await stack.enter_async_context(ProbeClient(now, engine_secret(settings)))
    probes = PostgresProbeStore(database, conversations)
    answer_later = partial(engines.answer, temperature=KNOWN_TEMPERATURE, after_chats=True)
    thinking = await stack.enter_async_context(ThinkingProbe(engine_endpoints(settings, now)))
    probing = ProbeActivities(probes, engines.answer, answer_later, thinking.of, judge, settings.probes_at_once)
    practising = await stack.enter_async_context(PracticeClient(now, engine_secret(settings)))
    practised = PostgresPracticeStore(database, conversations)
    practice = PracticeActivities(practised, practising.answer, renderer.render, work)
    return Worker(
        client,
        task_queue=names.JUDGE_QUEUE,
        activities=[
            judging.judge_turn,
            judging.judge_turns,
            judging.collect_direct_vote,
            probing.probe_version,
            probing.ask_general_questions,
            practice.practise,
            episodes.judge_episode,
        ],
        max_concurrent_activities=MAX_CONCURRENT_ACTIVITIES,
        graceful_shutdown_timeout=GRACE,
    )


async def try_new_judge(
    settings: Settings,
    directory: Callable[[], Directory],
    store: PostgresTrialStore,
    recipe_of: Callable[[str], Awaitable[Recipe]],
) -> None:
    """Try the judge of the first policy whose recipe asks one, unless it was tried or thinks first; until it answers.
    Turns are judged meanwhile as without a trial."""
    async with judge_client(settings, directory) as judge:
        while True:
            try:
                policy = await _first_that_asks(directory().policies, recipe_of)
                if policy is None:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                name, digest = await judge.identity(policy)
                if await store.trial(digest) is not None:
                    return
                if await judge.form(policy, "auto") is AnswerForm.FREE:
                    log.info("the judge was not tried: `clawloop judge try` measures it", extra={"judge": name})
                    return
                trial = await try_judge(judge, policy)
                await store.keep(trial)
                found = {"form": trial.form, "accuracy": trial.reported.accuracy, "kappa": trial.reported.kappa}
                log.info(trial.votes_off or "the judge was tried", extra={"judge": name} | found)
                return
            except (JudgeUnavailable, StoreUnavailable) as error:
                log.debug("the judge is not tried yet", extra={"why": str(error)})
                await asyncio.sleep(RETRY_SECONDS)
            except JudgeRefused as error:
                log.warning("the judge cannot be tried", extra={"why": str(error)})
                return


async def _first_that_asks(policies: Sequence[Policy], recipe_of: Callable[[str], Awaitable[Recipe]]) -> str | None:
    """The first policy whose recipe asks a judge; None: there is none yet."""
    for policy in policies:
        with suppress(RecordUnusable, RecipeRejected):  # it has no recipe that can be used
            if (await recipe_of(policy.id)).signal.asks_judge:
                return policy.id
    return None


async def _start_training_workflows(directory: PostgresDirectoryStore, notifier: Notifier) -> None:
    """Signal-with-start each policy's training workflow, and retry. Engine workflows are started by their agents."""
    while True:
        try:
            for policy in (await directory.read()).policies:
                await notifier.notify(BatchWaits(policy.id))
            return
        except (StoreUnavailable, SignalFailed) as error:
            log.warning("training workflows not started yet", extra={"why": str(error)})
            await asyncio.sleep(RETRY_SECONDS)
