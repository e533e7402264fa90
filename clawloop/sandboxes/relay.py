"""The only way out of a sandbox: a Unix socket whose connections are passed to the gateway, and to nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_CHUNK = 64 * 1024


@asynccontextmanager
async def relaying(path: Path, host: str, port: int) -> AsyncIterator[None]:
    """Accept connections at `path` while the block runs; then cut those that are open."""
    open_now: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        try:
            # The sandbox's end cancels this task, and Python 3.11's server logs a cancelled one as a crash.
            with suppress(OSError, asyncio.CancelledError):
                await _connect(reader, writer, host, port)
        finally:
            writer.close()
            open_now.discard(task)

    server = await asyncio.start_unix_server(pass_on, path)
    path.chmod(0o666)  # the sandbox has a user of its own; only that user sees the folder
    try:
        yield
    finally:
        server.close()
        for task in list(open_now):
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    gateway_reader, gateway_writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, gateway_writer))
            group.create_task(_copy(gateway_reader, writer))
    except* OSError:
        pass
    finally:
        gateway_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
