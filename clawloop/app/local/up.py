"""`clawloop up`: starts, supervises and stops everything Clawloop needs on one machine.

PostgreSQL, Temporal and vLLM start in parallel. Gateway and workers start once PostgreSQL is ready and `prepare` has
run; the gateway holds requests until an engine is ready. External parts (DATABASE_URL, TEMPORAL_ADDRESS,
CLAWLOOP_ENGINES) are used and not started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from clawloop.app.layout.memory import chats_of_gateway, grammars_of_gateway, probes_at_once
from clawloop.app.layout.table import overview
from clawloop.app.local import checks, parts
from clawloop.app.local.keys_file import read_keys, write_keys
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import Plan, UpOptions, plan_parts
from clawloop.app.local.private_folder import keep_private
from clawloop.app.local.supervision.supervisor import Board, Part, PartState, PartStatus, Supervisor
from clawloop.app.processes.listener import QUEUED_CONNECTIONS
from clawloop.core.encryption.key_file import SETTING
from clawloop.core.errors import SetupError
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Prepare = Callable[[Deployment], Awaitable[Mapping[str, str]]]
"""Prepares the database for the gateway: migrates it, inserts policy and engines, creates keys.

Called at every start, once PostgreSQL answers. Returns a valid secret for each scope: that of `Deployment.keys` if it
is still valid, else a new one. Raises SetupError.
"""


@dataclass(frozen=True, slots=True)
class Started:
    """The running deployment, once all its parts are ready.

    Args:
        gateway: its URL, without `/v1`.
        temporal_ui: None if Temporal is external.
        keys: secrets by scope.
        supervisor: of the parts.
    """

    gateway: str
    temporal_ui: str | None
    deployment: Deployment
    keys: Mapping[str, str]
    supervisor: Supervisor


Use = Callable[[Started], Awaitable[None]]
"""Uses the running deployment; when it returns, everything is stopped."""


async def run(options: UpOptions, board: Board, prepare: Prepare, use: Use | None = None) -> None:
    """Start everything, keep it running until SIGINT, SIGTERM or SIGHUP, then stop it within 20 s.

    A second signal kills what is still stopping.

    Args:
        use: called once every part is ready; `run` ends when it returns, and raises what it raises.

    Raises:
        SetupError: a part cannot start; all parts have been stopped.
    """
    with checks.lock_data_folder(options.data):
        if tightened := keep_private(options.data):
            board.say(f"{options.data} is for its owner alone now: {tightened} files and folders were open to others")
        stop = asyncio.Event()
        supervisor = Supervisor(options.data / "logs", board.changed)
        listener = checks.bound_socket("the gateway", options.host, options.port, "--port")
        loop = asyncio.get_running_loop()

        def request_stop() -> None:
            if stop.is_set():
                supervisor.kill_stopping()
            stop.set()

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, request_stop)
        try:
            await _until(stop, _start_and_supervise(options, listener, supervisor, board, prepare, use))
        except SetupError as error:
            board.say(f"cannot go on: {error}")  # before all that is told of stopping
            raise
        finally:
            groups = [", ".join(group) for group in parts.stop_order(supervisor.names) if group]
            board.say(f"stopping {'; then '.join(groups) or 'before anything was started'}")
            listener.close()  # the gateways hold it, too, until they stop
            await supervisor.stop(parts.stop_order(supervisor.names))
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
        # The user of the parts decides whether the folder is kept.
        board.say("stopped" if use is not None else f"stopped; the data stays in {options.data}")


async def _start_and_supervise(
    options: UpOptions,
    listener: socket.socket,
    supervisor: Supervisor,
    board: Board,
    prepare: Prepare,
    use: Use | None,
) -> None:
    """Returns when `use` does; without `use` it ends only by an exception or by cancellation.

    Raises:
        SetupError: a part cannot be started.
    """
    plan = await plan_parts(options)
    if plan.models is not None:
        for line in overview(plan.models.layout):
            board.say(line)
    for part in plan.external:
        now = datetime.now().astimezone()
        board.changed(PartStatus(part.name, PartState.EXTERNAL, part.address, "", now, 0))
    for part_to_start in plan.parts:
        supervisor.start(part_to_start)

    async def start_and_use() -> None:
        started = await _start_gateways_and_workers(options, plan, listener, supervisor, board, prepare)
        await _start_trainer(options, plan, supervisor, started.deployment)
        if plan.models is not None:
            for engine in plan.models.engines:
                await supervisor.ready(engine.name)
        board.say(f"ready: {started.gateway}/v1 answers chats")
        if use is None:
            await asyncio.Event().wait()
        else:
            await supervisor.all_ready()
            await use(started)

    using = asyncio.create_task(start_and_use())
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


async def _start_gateways_and_workers(
    options: UpOptions, plan: Plan, listener: socket.socket, supervisor: Supervisor, board: Board, prepare: Prepare
) -> Started:
    if plan.postgres is not None:
        await supervisor.ready("postgres")
    keys_path = options.data / "keys.json"
    stored_keys = read_keys(keys_path)
    url = parts.gateway_url(*listener.getsockname()[:2])
    sandboxed = url if await makes_sandboxes(options, board) else None
    page = options.environment.get("CLAWLOOP_PAGE") or f"{url}/ui"
    deployment = replace(_deployment(options, plan, stored_keys), sandboxed=sandboxed, page=page, gateway=url)
    keys = dict(await prepare(deployment))
    if keys != stored_keys:
        write_keys(keys_path, keys)
    if not stored_keys and options.recipe is None and not options.first_recipe.signal.asks_judge:
        board.say(
            f"a new policy learns by the recipe {options.first_recipe.name}, from what users say next and from "
            f"ratings: {plan.base_model} is too small to judge; --recipe FILE for another"
        )
    listener.listen(QUEUED_CONNECTIONS)  # from now on connections wait for a gateway, and none is refused
    gateways = parts.gateways(deployment, listener, options.gateways, options.environment)
    workers = parts.workers(deployment, options.environment)
    for part in (*gateways, *workers):
        supervisor.start(part)
    write_targets(options.data, [replace(gateways[0], name="gateway"), *workers])  # any gateway has the page of all
    for gateway in gateways:
        await supervisor.ready(gateway.name)
    board.say(f"gateway      {url}/v1")
    board.say(f"page         {url}/ui")
    if plan.temporal_ui is not None:
        board.say(f"Temporal UI  {plan.temporal_ui}")
        board.say("             every user of this machine can read and change it")
    for scope, secret in keys.items():
        if secret != stored_keys.get(scope):
            board.say(f"{scope} key".ljust(13) + secret)
    board.say(f"keys are in {keys_path}, logs in {options.data / 'logs'}; Ctrl-C stops everything")
    return Started(url, plan.temporal_ui, deployment, keys, supervisor)


async def makes_sandboxes(options: UpOptions, board: Board) -> bool:
    """True if episodes can run here; if the operator may expect it and they cannot, says why in one line."""
    if not options.sandboxes:
        return False
    try:
        await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    except SetupError as error:
        board.say(f"no environment worker, so no rollouts on this machine: {error}")
        return False
    return True


async def _start_trainer(options: UpOptions, plan: Plan, supervisor: Supervisor, deployment: Deployment) -> None:
    if plan.models is None or deployment.trained_model is None:
        return
    if plan.models.trainer_waits:
        for engine in plan.models.engines:
            await supervisor.ready(engine.name)
    trainer = parts.trainer(deployment.trained_model, deployment, options.environment)
    supervisor.start(trainer)
    write_targets(options.data, [trainer], further=True)


def write_targets(data: Path, served: Sequence[Part], *, further: bool = False) -> None:
    """Replace the file that tells Prometheus' `file_sd_configs` where metrics are served, atomically.

    Args:
        further: what the file names is kept.
        served: each of them serves `/metrics` at its address, or one page for each of its roles.
    """
    path = data / "metric-targets.json"
    targets = [target for part in served for target in _targets(part)]
    if further:
        targets = [*json.loads(path.read_text(encoding="utf-8")), *targets]
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{json.dumps(targets, indent=2)}\n", encoding="utf-8")
    new.replace(path)


def _targets(part: Part) -> list[dict[str, object]]:
    """One for each role, labelled as the role's own process would be."""
    address = [urlsplit(part.address).netloc]
    if not part.roles:
        return [{"targets": address, "labels": {"process": part.name}}]
    return [
        {"targets": address, "labels": {"process": role, "__metrics_path__": f"/metrics/{role}"}} for role in part.roles
    ]


def _deployment(options: UpOptions, plan: Plan, keys: Mapping[str, str]) -> Deployment:
    database_url = plan.database_url if plan.postgres is None else plan.postgres.url
    assert database_url is not None
    models = plan.models
    trainer = None if models is None else models.trainer
    return Deployment(
        data=options.data,
        database_url=database_url,
        temporal_address=plan.temporal_address,
        engines=plan.engines,
        base_model=plan.base_model,
        aliases=options.aliases or (plan.base_model.rsplit("/", 1)[-1].lower(),),
        keys=keys,
        allowed_hosts=options.allowed_hosts,
        recipe=options.recipe,
        first_recipe=options.first_recipe,
        trained_model=None if models is None else models.trained_model,
        trainer_arguments=() if trainer is None else trainer.arguments,
        trainer_environment={} if trainer is None else trainer.environment,
        local_engines=() if models is None else models.urls,
        judge=None if models is None else models.judge,
        max_lora_rank=options.models.max_lora_rank,
        quantised=options.models.quantised,
        # The operator's own address comes first: browsers elsewhere reach the UI by a proxy.
        temporal_ui=options.environment.get("CLAWLOOP_TEMPORAL_UI") or plan.temporal_ui,
        encryption_key_file=_key_file(options.environment),
        context_tokens=None if models is None else models.layout.max_model_len,
        engine_chats=None if models is None else chats_of_gateway(models.seqs, options.gateways),
        probes=None if models is None else probes_at_once(models.seqs),
        grammars=None if models is None else grammars_of_gateway(os.cpu_count() or 1, options.gateways),
    )


def _key_file(environment: Mapping[str, str]) -> Path | None:
    path = environment.get(SETTING)
    return Path(path).absolute() if path else None


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Await `work` and raise what it raises, or cancel it once `stop` is set."""
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
