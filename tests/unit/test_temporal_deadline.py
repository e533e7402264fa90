"""Temporal that does not answer, in each of the ways it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.service import RPCError, RPCStatusCode

from clawloop.errors import SignalFailed
from clawloop.temporal.client import connect
from clawloop.temporal.deadline import temporal_deadline
from clawloop.temporal.training_notifier import TemporalTraining


@pytest.fixture
async def mute() -> AsyncIterator[str]:
    """The address of somebody who listens and says nothing."""
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
async def test_somebody_who_listens_and_says_nothing_is_waited_for_no_longer_than_the_limit(mute: str) -> None:
    operations = TemporalTraining(await connect(mute, lazy=True))
    # The SDK alone gives up after 30 s.
    async with asyncio.timeout(20):
        with pytest.raises(SignalFailed, match="Temporal: Timeout"):
            await operations.pause("default", "why")
        with pytest.raises(SignalFailed, match="Temporal: no answer within 3 s"):
            await operations.notify_work("default")


def not_found() -> RPCError:
    return RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")


async def test_what_is_refused_or_not_reached_is_one_error_with_its_words() -> None:
    for error in (not_found(), RuntimeError("failed\n to  connect")):
        with pytest.raises(SignalFailed, match=r"Temporal: (workflow not found|failed to connect)"):
            async with temporal_deadline():
                raise error


async def test_only_a_workflow_that_is_gone_need_not_be_told() -> None:
    async with temporal_deadline(may_be_gone=True):
        raise not_found()
    with pytest.raises(SignalFailed):
        async with temporal_deadline(may_be_gone=True):
            raise RPCError("no", RPCStatusCode.PERMISSION_DENIED, b"")


async def test_who_gives_up_the_whole_is_not_told_of_a_limit() -> None:
    async def tell() -> None:
        async with temporal_deadline(timedelta(hours=1)):
            await asyncio.Event().wait()

    task = asyncio.create_task(tell())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
