"""The whole system as `clawloop up` supervises it, with a proxy before each service and folders that can be filled.

Nothing of the product is replaced. The judge is the engine itself, behind a relay that remembers what was asked.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from clawloop.app.cli.up import prepare_deployment
from clawloop.app.local import parts
from clawloop.app.local.checks import bound_socket, choose_port
from clawloop.app.local.parts import Deployment
from clawloop.app.local.services import temporal_server
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.local.services.vllm import read_model
from clawloop.app.local.supervision import guard
from clawloop.app.local.supervision.supervisor import Part, PartStatus, Supervisor
from clawloop.app.processes.listener import QUEUED_CONNECTIONS
from clawloop.core.judging.records import DIRECT, HINTS, VOTES
from clawloop.core.recipes.lessons import Lessons
from clawloop.core.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.lessons.ledger import PostgresLessonStore
from tests.chaos.judge_relay import JudgeRelay
from tests.chaos.proxy import Proxy
from tests.chaos.stand_in_engine import LESSON
from tests.engine_options import engine_options

GATEWAYS = 2
RANK = "trainer's rank"
BATCH_SAMPLES = 8
SAMPLED_VOTES = 3
# How many answers of a judge a judgement has.
ANSWERS = {VOTES: SAMPLED_VOTES, HINTS: SAMPLED_VOTES, DIRECT: 1}
_TRAIN: dict[str, object] = {
    "batch_samples": BATCH_SAMPLES,
    "lora": {"rank": 4, "alpha": 8},
    # Under load a reply may be many versions old; samples that expire would only slow training down.
    "staleness_versions": 64,
}
RECIPE = Recipe.model_validate(
    {
        "name": "chaos",
        "signal": {"hints": False, "m": SAMPLED_VOTES},
        "train": _TRAIN | {"advantage": {"teacher_weight": 0.0}},
    }
)
WITH_HINTS = Recipe.model_validate({"name": "chaos_with_hints", "signal": {"m": SAMPLED_VOTES}, "train": _TRAIN})
WITH_PRACTICE = WITH_HINTS.model_copy(
    update={"name": "chaos_with_practice", "lessons": Lessons(enabled=True, practice=True, shared=True)}
)
"""Shared, as a fuzzer makes keys as well."""
# What each process's command line holds, and nobody else's.
_MARKS = {
    "gateway": ("clawloop.app.cli.main", "gateway"),
    "orchestrator": ("clawloop.app.cli.main", "orchestrator"),
    "judge": ("clawloop.app.cli.main", "judge"),
    "trainer": ("clawloop.app.cli.main", "trainer"),
    RANK: ("clawloop.app.processes.trainer",),
    "engine-agent": ("clawloop.app.cli.main", "engine"),
    "combined-worker": ("clawloop.app.cli.main", "combined"),
    "temporal": ("start-dev",),
    "postgres": ("bin/postgres",),
    "vllm": ("vllm.entrypoints.openai.api_server",),
}


@dataclass
class Stack:
    """
    Attributes:
        proxies: before `gateway`, `postgres`, `temporal` and `engine`.
        database_url, temporal_address: without a proxy, for the checks.
        crash_points: where a file arms a crash point.
        others: children of this process that are not of the stack, such as services that tests share.
        statuses: every change of a part's state.
    """

    folder: Path
    data: Path
    supervisor: Supervisor
    proxies: dict[str, Proxy]
    judge: JudgeRelay
    gateway_url: str
    engine_url: str
    database_url: str
    temporal_address: str
    temporal_folder: Path
    keys: dict[str, str]
    crash_points: Path
    own_engine: bool
    base_model: str
    ranks: int
    judges: int
    practises: bool
    others: frozenset[int]
    statuses: list[PartStatus] = field(default_factory=list)

    @property
    def ours(self) -> tuple[str, ...]:
        """The parts that run our code."""
        if self.judges == 1:
            return ("gateway", "combined-worker", "trainer")
        return ("gateway", "orchestrator", "judge", "engine-agent", "trainer")

    def processes(self, part: str) -> list[psutil.Process]:
        """The processes of a part that run now, without the guard above them; the main one first."""
        found = []
        own = [child for child in psutil.Process().children() if child.pid not in self.others]
        for process in (process for child in own for process in family(child)):
            try:
                command, status = process.cmdline(), process.status()
            except psutil.Error:  # it has just ended
                continue
            if guard.__name__ in command or status == psutil.STATUS_ZOMBIE:
                continue
            if all(any(mark == word or word.endswith(mark) for word in command) for mark in _MARKS[part]):
                found.append(process)
        return found


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it; none if it has just ended."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@asynccontextmanager
async def running_stack(
    folder: Path, model: Path, engine_port: int | None = None, ranks: int = 1, judges: int = 1, recipe: Recipe = RECIPE
) -> AsyncIterator[Stack]:
    """
    Args:
        folder: empty.
        engine_port: of an engine that runs; None starts one.
        ranks: of the trainer; with one it is a single process.
        judges: with one the workers run as `clawloop up` runs them, in one process; with several, as a cluster does,
            in a process each.
    """
    others = frozenset(child.pid for child in psutil.Process().children())
    data, crash_points = folder / "data", folder / "crash-points"
    for made in (data, crash_points):
        made.mkdir(parents=True, exist_ok=True)
    statuses: list[PartStatus] = []
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CLAWLOOP_CRASH_POINTS": str(crash_points)}
    supervisor = Supervisor(folder / "logs", statuses.append)
    postgres = EmbeddedPostgres(folder / "postgres", choose_port("PostgreSQL", parts.LOOPBACK, 0, ""))
    ports = temporal_server.Ports(*(choose_port("Temporal", parts.LOOPBACK, 0, "") for _ in range(3)))
    own_engine = engine_port is None
    engine_port = engine_port or choose_port("vLLM", parts.LOOPBACK, 0, "")
    services: list[Part] = [parts.postgres(postgres), parts.temporal(folder / "temporal", ports, environment)]
    if own_engine:
        options = engine_options(model, engine_port)
        services.append(parts.vllm(parts.ENGINE, read_model(model), options, "CPU", environment))
    listener = bound_socket("the gateway", parts.LOOPBACK, 0, "")
    # At once: nobody knows the port yet, and one that only is bound another process may still take.
    listener.listen(QUEUED_CONNECTIONS)
    targets = {
        "gateway": listener.getsockname()[1],
        "postgres": postgres.port,
        "temporal": ports.main,
        "engine": engine_port,
    }
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        proxies = {}
        for name, target in targets.items():
            port = choose_port(f"the proxy of {name}", parts.LOOPBACK, 0, "")
            proxies[name] = await stack.enter_async_context(Proxy(target, port))
        engine_url = f"http://{parts.LOOPBACK}:{proxies['engine'].port}"
        judge = await stack.enter_async_context(JudgeRelay(engine_url, model.name))
        stack.push_async_callback(_stop, supervisor)
        for service in services:
            supervisor.start(service)
        await supervisor.ready("postgres")
        parsed = urlsplit(postgres.url)
        proxied = parsed._replace(netloc=parsed.netloc.replace(str(postgres.port), str(proxies["postgres"].port)))
        deployment = Deployment(
            data=data,
            database_url=proxied.geturl(),
            temporal_address=f"{parts.LOOPBACK}:{proxies['temporal'].port}",
            engines=(engine_url,),
            base_model=model.name,
            aliases=(),
            keys={},
            recipe=recipe,
            trained_model=model,
            trainer_arguments=("--device", "cpu", "--dtype", "float32", "--nproc", str(ranks)),
            local_engines=(engine_url,),
        )
        keys = await prepare_deployment(deployment)
        if recipe.lessons.practice:
            database = Database(postgres.url, BACKGROUND_LIMIT)
            await PostgresLessonStore(database).add("default", LESSON)
            await database.close()
        environment |= {"CLAWLOOP_JUDGE_URL": judge.url, "CLAWLOOP_JUDGE_MODEL": model.name}
        # The disks of `make chaos` are smaller than what is kept free by default.
        environment |= {"CLAWLOOP_JUDGE_FORM": "grammar", "CLAWLOOP_MIN_FREE_DISK_GIB": "0.05"}
        gateways = parts.gateways(deployment, listener, GATEWAYS, environment)
        if judges == 1:
            workers = parts.workers(deployment, environment)
        else:
            workers = parts.separate_workers(deployment, environment)
        for number in range(1, judges):
            others_like_it = parts.separate_workers(deployment, environment)
            workers += [replace(part, name=f"judge-{number}") for part in others_like_it if part.name == parts.JUDGE]
        for part in (*gateways, *workers, parts.trainer(model, deployment, environment)):
            supervisor.start(part)
        await supervisor.all_ready()
        yield Stack(
            folder=folder,
            data=data,
            supervisor=supervisor,
            proxies=proxies,
            judge=judge,
            gateway_url=f"http://{parts.LOOPBACK}:{proxies['gateway'].port}",
            engine_url=f"http://{parts.LOOPBACK}:{engine_port}",
            database_url=postgres.url,
            temporal_address=f"{parts.LOOPBACK}:{ports.main}",
            temporal_folder=folder / "temporal",
            keys=keys,
            crash_points=crash_points,
            own_engine=own_engine,
            base_model=model.name,
            ranks=ranks,
            judges=judges,
            practises=recipe.lessons.practice,
            others=others,
            statuses=statuses,
        )


async def _stop(supervisor: Supervisor) -> None:
    await supervisor.stop(parts.stop_order(supervisor.names))
