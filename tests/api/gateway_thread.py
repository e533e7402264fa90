"""A gateway on an event loop of its own, for clients that block: hypothesis and schemathesis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.reading import Reading
from clawloop.operations.sessions import SessionOperations
from db.database import BACKGROUND_LIMIT, Database
from db.erasure import PostgresErasureStore
from db.judging.rejudging import PostgresRejudgeStore
from db.training.status import PostgresTrainingBrowser
from db.turns.sessions import PostgresSessionStore
from tests.api.conftest import Gateway, running_gateway
from tests.contract.learning import PostgresLearning
from tests.fakes.engine import fake_engine
from tests.ui.recorded import Recorder

# Short, because the requests are sent one after the other.
HOLD_SECONDS = 0.02


class GatewayThread(threading.Thread):
    """A gateway on an event loop of its own, for a blocking client.

    Args:
        database_url: migrated, without rows, and of this gateway alone: a session is recorded there, and sessions are
            read, judged again and erased there. Without it they are in memory, and what pages read is away.
    """

    def __init__(self, folder: Path, database_url: str | None = None) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.database_url = database_url
        self.ready = threading.Event()
        self.gateway: Gateway | None = None
        self._engines = AsyncExitStack()
        self._loop_and_stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        stop = asyncio.Event()
        self._loop_and_stop = (asyncio.get_running_loop(), stop)
        async with self._engines:
            engine = await self._engines.enter_async_context(fake_engine())
            async with running_gateway(self.folder, engines=[engine], hold_seconds=HOLD_SECONDS) as self.gateway:
                if self.database_url is not None:
                    database = Database(self.database_url, BACKGROUND_LIMIT)
                    self._engines.push_async_callback(database.close)
                    await Recorder(await PostgresLearning.on(self.database_url, database)).chat("recorded", "Hello")
                    self._use(database, self.gateway)
                self.ready.set()
                await stop.wait()

    def _use(self, database: Database, gateway: Gateway) -> None:
        # What finds a session and what changes it use the same store.
        gateway.services.reading = Reading(PostgresSessionStore(database))
        gateway.services.session_operations = SessionOperations(
            PostgresRejudgeStore(database),
            PostgresErasureStore(database),
            ArtifactFolder(self.folder / "artifacts").delete,
            gateway.operator,
        )
        gateway.services.training_browser = PostgresTrainingBrowser(database)

    def stop_engine(self) -> None:
        """Stop the engine; returns once its port is closed."""
        assert self._loop_and_stop is not None
        asyncio.run_coroutine_threadsafe(self._engines.aclose(), self._loop_and_stop[0]).result(10)

    def stop(self) -> None:
        assert self._loop_and_stop is not None
        loop, stop = self._loop_and_stop
        loop.call_soon_threadsafe(stop.set)
        self.join()


@contextmanager
def gateway_thread(folder: Path, database_url: str | None = None) -> Iterator[tuple[GatewayThread, Gateway]]:
    thread = GatewayThread(folder, database_url)
    thread.start()
    try:
        assert thread.ready.wait(60)
        assert thread.gateway is not None
        yield thread, thread.gateway
    finally:
        thread.stop()
