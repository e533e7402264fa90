"""Each way in which Temporal may not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.service import RPCError, RPCStatusCode

from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import temporal_deadline
from clawloop.core.contracts.notices import BatchWaits, OperatorChanged
from clawloop.core.contracts.training import OperatorAction, OperatorChange
from clawloop.core.errors import SignalFailed


@pytest.fixture
async def silent_server() -> AsyncIterator[str]:
    """The address of a server that accepts connections and never answers."""
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    gone.set()
    server.close()


@pytest.mark.slow
async def test_a_server_that_never_answers_is_not_waited_for_beyond_the_limit(silent_server: str) -> None:
    notifier = TemporalNotifier(await connect(silent_server, lazy=True), timedelta(hours=1))
    # The SDK alone gives up after 30 s.
    async with asyncio.timeout(20):
        with pytest.raises(SignalFailed, match="Temporal: Timeout"):
            await notifier.notify(OperatorChanged("default", OperatorChange(OperatorAction.PAUSE, "why")))
        with pytest.raises(SignalFailed, match="Temporal: no answer within 3 s"):
            await notifier.notify(BatchWaits("default"))


def not_found() -> RPCError:
    return RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")


async def test_refused_and_failed_calls_raise_one_error_with_the_message() -> None:
    for error in (not_found(), RuntimeError("failed\n to  connect")):
        with pytest.raises(SignalFailed, match=r"Temporal: (workflow not found|failed to connect)"):
            async with temporal_deadline():
                raise error


async def test_only_a_missing_workflow_is_ignored() -> None:
    async with temporal_deadline(may_be_gone=True):
        raise not_found()
    with pytest.raises(SignalFailed):
        async with temporal_deadline(may_be_gone=True):
            raise RPCError("no", RPCStatusCode.PERMISSION_DENIED, b"")


async def test_cancellation_is_not_taken_for_a_time_out() -> None:
    async def call() -> None:
        async with temporal_deadline(timedelta(hours=1)):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
