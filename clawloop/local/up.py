"""`clawloop up`: everything Clawloop needs on one machine, started, watched and ended together.

Knows nothing about tables, keys or chats: what the database needs before the gateway starts is handed in. Parts
the operator gives (DATABASE_URL, TEMPORAL_ADDRESS, CLAWLOOP_ENGINES) are used and not started. PostgreSQL,
Temporal and vLLM start side by side; the gateway starts once PostgreSQL is ready, and holds requests until an
engine is. The workers start with it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from clawloop.errors import ModelUnsupported, SetupError
from clawloop.local import checks, parts
from clawloop.local.keys_file import read_keys, write_keys
from clawloop.local.services import temporal_server
from clawloop.local.services.postgres import EmbeddedPostgres
from clawloop.local.services.vllm import EngineOptions, ModelFacts, read_model
from clawloop.local.supervision.part import Part, PartState, PartStatus
from clawloop.local.supervision.status import Board
from clawloop.local.supervision.supervisor import Supervisor
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.recipes.recipe import Recipe
from clawloop.training.model.architecture import read_architecture

# Who others write to ends last. The bounds of each group add up to less than the 15 s a person is promised.
STOP_ORDER = (("gateway", *parts.WORKERS), ("vllm", "temporal"), ("postgres",))


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What was asked for. Port 0 is any free one.

    Args:
        model: a model folder; None is the random tiny one.
        engines: URLs of engines to use; empty starts one.
        train: learn from what is recorded; without it it is only recorded and judged.
        recipe: what the policy learns by from now on; None: what it learned by before, or the default.
        max_lora_rank: of the adapters that the engine started here can load.
        allowed_hosts: names by which clients may address the gateway, beside loopback and addresses.
        environment: of this process; parts inherit it.
    """

    data: Path
    environment: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 30000
    allowed_hosts: tuple[str, ...] = ()
    temporal_port: int = 7233
    temporal_ui_port: int = 8233
    engine_port: int = 8100
    postgres_port: int = 0
    model: Path | None = None
    aliases: tuple[str, ...] = ()
    dtype: str | None = None
    max_model_len: int | None = None
    database_url: str | None = None
    temporal_address: str | None = None
    engines: tuple[str, ...] = ()
    train: bool = True
    recipe: Recipe | None = None
    max_lora_rank: int = 16


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the gateway will find around it.

    Args:
        engines: URLs.
        base_model: the name under which the engines serve version 0.
        aliases: more names for the policy; the base model's short name unless others were asked for.
        allowed_hosts: as in UpOptions.
        keys: secrets by scope that earlier starts made.
        recipe: as in UpOptions.
        model: the folder the trainer learns on; None: no trainer.
        dtype: of the base weights; None: the model's own.
        own_engine: the engine started here, which needs an agent; None if there is none.
        max_lora_rank: as in UpOptions.
    """

    data: Path
    database_url: str
    temporal_address: str
    engines: tuple[str, ...]
    base_model: str
    aliases: tuple[str, ...]
    keys: Mapping[str, str]
    allowed_hosts: tuple[str, ...] = ()
    recipe: Recipe | None = None
    model: Path | None = None
    dtype: str | None = None
    own_engine: str | None = None
    max_lora_rank: int = 16


Prepare = Callable[[Surroundings], Awaitable[Mapping[str, str]]]
"""What the database needs before the gateway starts: migrate, enter policy and engines, ensure keys.

Called at every start, once PostgreSQL answers. Returns the secrets by scope that are good now: those of
`Surroundings.keys` that still are, and new ones for the rest. Raises SetupError.
"""


Gateway = Callable[[Surroundings, str, int, Mapping[str, str]], Part]
"""Makes the gateway's part from its surroundings, host, port and environment."""


Workers = Callable[[Surroundings, Mapping[str, str]], list[Part]]
"""Makes the workers' parts from their surroundings and environment."""


@dataclass(frozen=True, slots=True)
class Started:
    """Where the parts are, once all of them are ready.

    Args:
        gateway: its URL, without `/v1`.
        temporal_ui: None if Temporal is not ours.
        keys: secrets by scope.
    """

    gateway: str
    temporal_ui: str | None
    surroundings: Surroundings
    keys: Mapping[str, str]


Use = Callable[[Started], Awaitable[None]]
"""What everything was started for: when it ends, everything is ended."""


async def run(
    options: UpOptions,
    board: Board,
    prepare: Prepare,
    gateway: Gateway = parts.gateway,
    workers: Workers = parts.workers,
    use: Use | None = None,
) -> None:
    """Start everything and keep it running until SIGINT or SIGTERM; then end everything, within 15 s.

    Args:
        use: begun once every part is ready; everything ends with it, and what it raises is raised here.

    Raises:
        SetupError: something cannot start; nothing of ours runs any more.
    """
    with checks.held_data_folder(options.data):
        stop = asyncio.Event()
        supervisor = Supervisor(options.data / "logs", board.changed)
        loop = asyncio.get_running_loop()

        def end() -> None:
            if stop.is_set():
                supervisor.hurry()  # told twice
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end)
        try:
            await _until(stop, _keep_up(options, supervisor, board, prepare, gateway, workers, use))
        finally:
            board.say("stopping")
            await supervisor.stop(STOP_ORDER)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
        board.say("stopped; the data stays in " + str(options.data))


async def _keep_up(
    options: UpOptions,
    supervisor: Supervisor,
    board: Board,
    prepare: Prepare,
    gateway: Gateway,
    workers: Workers,
    use: Use | None,
) -> None:
    """Ends with `use`; without it only by raising or by being cancelled.

    Raises:
        SetupError: some part cannot be started.
    """
    plan = await _plan(options)
    for name, address in plan.external:
        now = datetime.now().astimezone()
        board.changed(PartStatus(name, PartState.EXTERNAL, address, "", now, 0))
    for part in plan.parts:
        supervisor.start(part)

    async def bring_up_and_use() -> None:
        started = await _bring_up_gateway(options, plan, supervisor, board, prepare, gateway, workers)
        if use is None:
            await asyncio.Event().wait()
        else:
            await supervisor.all_ready()
            await use(started)

    using = asyncio.create_task(bring_up_and_use())
    failing = asyncio.create_task(supervisor.first_failure())
    try:
        await asyncio.wait({using, failing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (failing, using):
            if task.done():
                task.result()
    finally:
        for task in (using, failing):
            task.cancel()
        await asyncio.gather(using, failing, return_exceptions=True)


async def _bring_up_gateway(
    options: UpOptions,
    plan: _Plan,
    supervisor: Supervisor,
    board: Board,
    prepare: Prepare,
    gateway: Gateway,
    workers: Workers,
) -> Started:
    if plan.postgres is not None:
        await supervisor.ready("postgres")
    database_url = plan.database_url()
    keys_path = options.data / "keys.json"
    known = read_keys(keys_path)
    surroundings = Surroundings(
        data=options.data,
        database_url=database_url,
        temporal_address=plan.temporal_address,
        engines=plan.engines,
        base_model=plan.base_model,
        aliases=options.aliases or (plan.base_model.rsplit("/", 1)[-1].lower(),),
        keys=known,
        allowed_hosts=options.allowed_hosts,
        recipe=options.recipe,
        model=plan.learned,
        dtype=options.dtype,
        own_engine=plan.own_engine,
        max_lora_rank=options.max_lora_rank,
    )
    keys = dict(await prepare(surroundings))
    if keys != known:
        write_keys(keys_path, keys)
    port = checks.choose_port("the gateway", options.host, options.port, "--port")
    supervisor.start(gateway(surroundings, options.host, port, options.environment))
    for part in workers(surroundings, options.environment):
        supervisor.start(part)
    await supervisor.ready("gateway")
    url = parts.gateway_url(options.host, port)
    board.say(f"gateway      {url}/v1")
    if plan.temporal_ui is not None:
        board.say(f"Temporal UI  {plan.temporal_ui}")
    for scope, secret in keys.items():
        if secret != known.get(scope):
            board.say(f"{scope} key".ljust(13) + secret)
    board.say(f"keys are in {keys_path}, logs in {options.data / 'logs'}; Ctrl-C stops everything")
    return Started(url, plan.temporal_ui, surroundings, keys)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What will run here, with every port chosen, and what is elsewhere."""

    parts: list[Part]
    external: list[tuple[str, str]]
    postgres: EmbeddedPostgres | None
    given_database_url: str | None
    temporal_address: str
    temporal_ui: str | None
    engines: tuple[str, ...]
    base_model: str
    own_engine: str | None
    learned: Path | None  # what the trainer learns on

    def database_url(self) -> str:
        if self.postgres is not None:
            return self.postgres.url  # known once it has been prepared
        assert self.given_database_url is not None
        return self.given_database_url


async def _plan(options: UpOptions) -> _Plan:
    checks.require_disk(options.data)
    checks.choose_port("the gateway", options.host, options.port, "--port")
    started: list[Part] = []
    external: list[tuple[str, str]] = []
    postgres = None
    if options.database_url is not None:
        await checks.require_database(options.database_url)
        external.append(("postgres", "DATABASE_URL"))
    else:
        port = checks.choose_port("PostgreSQL", parts.LOOPBACK, options.postgres_port, "--postgres-port")
        postgres = EmbeddedPostgres(options.data / "postgres", port)
        started.append(parts.postgres(postgres))
    if options.temporal_address is not None:
        await checks.require_temporal(options.temporal_address)
        temporal_address, temporal_ui = options.temporal_address, None
        external.append(("temporal", temporal_address))
    else:
        port = checks.choose_port("Temporal", parts.LOOPBACK, options.temporal_port, "--temporal-port")
        ui_port = checks.choose_port("Temporal's UI", parts.LOOPBACK, options.temporal_ui_port, "--temporal-ui-port")
        http_port = checks.choose_port("Temporal's HTTP interface", parts.LOOPBACK, 0, "")
        temporal_address, temporal_ui = f"{parts.LOOPBACK}:{port}", f"http://{parts.LOOPBACK}:{ui_port}"
        ports = temporal_server.Ports(port, ui_port, http_port)
        started.append(parts.temporal(options.data / "temporal", ports, options.environment))
    own_engine = learned = None
    if options.engines:
        # Their adapters are loaded by agents beside them, and their model is trained where its folder is.
        base_model = await checks.require_engines(options.engines)
        engines = options.engines
        names = ["vllm"] if len(engines) == 1 else [f"vllm {n}" for n in range(1, len(engines) + 1)]
        external.extend(zip(names, engines, strict=True))
    else:
        model = _model(options)
        port = checks.choose_port("vLLM", parts.LOOPBACK, options.engine_port, "--engine-port")
        engine = EngineOptions(port, options.dtype, options.max_model_len, max_lora_rank=options.max_lora_rank)
        started.append(parts.vllm(model, engine, options.environment))
        base_model, engines = model.name, (f"http://{parts.LOOPBACK}:{port}",)
        own_engine, learned = engines[0], _learnable(model.path) if options.train else None
    return _Plan(
        parts=started,
        external=external,
        postgres=postgres,
        given_database_url=options.database_url,
        temporal_address=temporal_address,
        temporal_ui=temporal_ui,
        engines=engines,
        base_model=base_model,
        own_engine=own_engine,
        learned=learned,
    )


def _learnable(model: Path) -> Path:
    """The folder, if a trainer can learn on it.

    Raises:
        SetupError: says what it can, and how to do without.
    """
    try:
        read_architecture(model)
    except ModelUnsupported as error:
        raise SetupError(f"--model: {error}; to serve and record it without learning: --no-train") from error
    return model


def _model(options: UpOptions) -> ModelFacts:
    if options.model is None:
        return read_model(ensure_tiny_model(options.data / "models"))
    checks.require_model(options.model)
    return read_model(options.model)


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Do the work until told to stop; raises what it raises."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        stopping.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, SetupError):
            await working
