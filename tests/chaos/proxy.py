"""A TCP proxy that a fault can cut, delay, silence or double. It knows nothing of what it relays."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

_CHUNK = 64 * 1024
_ROUNDS_TO_SERVE = 4  # of the event loop, from the accepted connection to its relay


@dataclass(eq=False)
class _Connection:
    """
    Attributes:
        silent: nothing passes any more, and neither side is told: a peer that lost its network.
        aborted: it was cut.
        ended: nobody relays it any more.
    """

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    silent: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        self.aborted.set()
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Relays connections to one address on loopback. Use as an async context manager.

    Attributes:
        delay_seconds: each piece of data waits this long.
        doubled: what a client sends on a new connection also goes to a second one, whose answers nobody reads.
        affected: how many connections were cut, silenced and doubled, and how many pieces of data delayed.
    """

    def __init__(self, target_port: int, port: int) -> None:
        self.port = port
        self.delay_seconds = 0.0
        self.doubled = False
        self.affected: Counter[str] = Counter()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> Proxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        for connection in list(self._connections):
            await connection.ended.wait()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port, backlog=512)

    async def refuse(self) -> None:
        """Cut all connections, and take no new ones until `listen`."""
        server, self._server = self._server, None
        if server is not None:
            # asyncio never closes a connection that it has accepted, and not begun to serve, when its server closes.
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(_ROUNDS_TO_SERVE):
                await asyncio.sleep(0)
            server.close()
        self.cut()

    def cut(self) -> None:
        """Reset all connections; new ones are relayed."""
        self.affected["cut"] += len(self._connections)
        for connection in self._connections:
            connection.abort()

    def silence(self) -> None:
        """Leave all connections open, and relay nothing on them any more; new ones are relayed."""
        self.affected["silence"] += len(self._connections)
        for connection in self._connections:
            connection.silent = True

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
            connection.writers.append(upstream)
            copies, discarded = [upstream], []
            if self.doubled:
                double_reader, double = await asyncio.open_connection("127.0.0.1", self._target_port)
                connection.writers.append(double)
                copies.append(double)
                discarded.append(double_reader)
                self.affected["double"] += 1
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(connection, reader, copies))
                group.create_task(self._pump(connection, upstream_reader, [writer]))
                for double_reader in discarded:
                    group.create_task(_discard(double_reader))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # a side is gone: so is the connection
        finally:
            connection.abort()
            self._connections.discard(connection)
            connection.ended.set()

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]
    ) -> None:
        while data := await reader.read(_CHUNK):
            if self.delay_seconds:
                self.affected["delay"] += 1
                await asyncio.sleep(self.delay_seconds)
            if connection.silent:
                await connection.aborted.wait()
                break
            for writer in writers:
                writer.write(data)
            # The double may be closed by its server; the first writer is the connection.
            await writers[0].drain()
        raise ConnectionResetError("the other side closed")


async def _discard(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(_CHUNK):
            pass
