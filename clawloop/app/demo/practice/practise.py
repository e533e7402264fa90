"""`clawloop demo run --environment NAME`: starts all parts and lets the toy model practise in sandboxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.demo_folder import demo_folder
from clawloop.app.demo.practice.practice_run import Run
from clawloop.app.demo.practice.report import PracticeReport, write
from clawloop.app.demo.practice.toy import Toy
from clawloop.app.demo.run import database_of, model_in, parts_environment
from clawloop.app.local.checks import require_disk, require_folder
from clawloop.app.local.model_layout import ModelOptions, widest_dtype
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
from clawloop.app.local.supervision.supervisor import Board
from clawloop.app.local.up import Prepare, Started
from clawloop.app.local.up import run as run_up
from clawloop.core.contracts.serving import Scope
from clawloop.environments.runner import SandboxRunner
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from db.training.recipes import ensure_recipe

_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PracticeOptions:
    """
    Args:
        toy: what practises.
        seeds: of the runs, one after another; a run's first adapter depends on its seed.
        versions: a run ends when this version is active; minutes: or after this time.
        data: the demo uses the subfolder `demo`.
        out: folder of the report.
        began: when setup began, as `time.time`.
    """

    toy: Toy
    seeds: Sequence[int]
    versions: int
    minutes: float
    data: Path
    out: Path
    environment: Mapping[str, str]
    began: float = field(default_factory=time.time)
    port: int = 0
    temporal_port: int = 0
    temporal_ui_port: int = 0
    engine_port: int = 0


async def practise(options: PracticeOptions, board: Board, prepare: Prepare) -> list[PracticeReport]:
    """Execute the runs and write the report; of an interrupted demo, the finished runs.

    Raises:
        SetupError: a part cannot start or fails, no sandboxes can be made here, or no episode is completed; all parts
            are stopped, and their logs stay.
    """
    require_folder(options.out)
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    demo = _Practice(options, board, prepare, sandboxes)
    with demo_folder(options.data, keep=False) as folder:
        require_disk(folder)
        up = UpOptions(
            data=folder,
            environment=parts_environment(options.environment),
            port=options.port,
            gateways=1,
            temporal_port=options.temporal_port,
            temporal_ui_port=options.temporal_ui_port,
            engine_port=options.engine_port,
            model=model_in(folder, options.toy.folder, options.toy.base_model),
            models=ModelOptions(dtype=widest_dtype(), max_model_len=_CONTEXT_TOKENS),
        )
        await run_up(up, board, demo.ready, use=demo.use)
    return demo.reports


class _Practice:
    def __init__(self, options: PracticeOptions, board: Board, prepare: Prepare, sandboxes: Bubblewrap) -> None:
        self._options = options
        self._board = board
        self._prepare = prepare
        self._sandboxes = sandboxes
        self._keys: dict[int, str] = {}
        self.reports: list[PracticeReport] = []

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        """Satisfies `clawloop.app.local.up.Prepare`."""
        secrets = await self._prepare(deployment)
        database = database_of(deployment)
        try:
            store = PostgresKeyStore(database)
            for seed in self._options.seeds:
                await ensure_policy(database, _policy(seed), deployment.base_model, [])
                await ensure_recipe(database, _policy(seed), self._options.toy.recipe())
                _, self._keys[seed] = await store.create_key(_policy(seed), frozenset(Scope), name=f"demo, seed {seed}")
        finally:
            await database.close()
        return secrets

    async def use(self, started: Started) -> None:
        """Satisfies `clawloop.app.local.up.Use`."""
        host, _, port = started.gateway.removeprefix("http://").rpartition(":")
        toy, deployment = self._options.toy, started.deployment
        runner = SandboxRunner(self._sandboxes, {toy.environment: toy.make()}, (host, int(port)))
        database = database_of(deployment)
        try:
            for seed in self._options.seeds:
                async with AdminClient(started.gateway, self._keys[seed]) as admin:
                    run = Run(
                        environment=toy.environment,
                        policy=_policy(seed),
                        seed=seed,
                        admin=admin,
                        loading=PostgresPublishingStore(database),
                        runner=runner,
                        key=self._keys[seed],
                        base_model=deployment.base_model,
                        board=self._board,
                        logs=deployment.data / "logs",
                    )
                    began = self._options.began if seed == self._options.seeds[0] else time.time()
                    self.reports.append(await run.practise(began, self._options.versions, self._options.minutes))
                    write(self._options.out / toy.report, self.reports)
                    self.reports[-1] = await run.measure_the_rest(self.reports[-1])
                    write(self._options.out / toy.report, self.reports)
                    # An engine holds the adapters of only a few policies; this one is no longer needed.
                    await admin.roll_back(_policy(seed))
        finally:
            await database.close()


def _policy(seed: int) -> str:
    return f"practice-{seed}"
