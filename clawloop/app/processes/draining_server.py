"""A uvicorn server that takes its share of a socket's connections, and ends without failing a request.

HTTP gives a server no way to take back an idle connection: a request may be on its way when it closes. So a draining
server answers one more request on each connection, with `Connection: close`, and closes only those that stay silent
between requests.
"""

from __future__ import annotations

import asyncio
import logging
import select
import signal
import socket
from asyncio import Transport
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import cast

import uvicorn

from api.http_protocol import BoundedHttpProtocol
from clawloop.app.processes.listener import QUEUED_CONNECTIONS

log = logging.getLogger(__name__)

# After each connection the other gateways get time to accept the next. Else one that happens to run takes all that
# arrive together, and keeps them for as long as they are alive. 1,000 connections a second are more than it can answer.
PAUSE_SECONDS = 0.001
# When no file descriptor is free.
ACCEPT_RETRY_SECONDS = 1.0
# A connection is closed after this silence: a client that goes on chatting has sent its next request by then.
SILENT_SECONDS = 1.0
# SIGINT cuts replies after this and uvicorn's second, as `clawloop up` kills the gateway after 9 s.
QUICK_SECONDS = 1.0
CUT_SECONDS = 1
_CHECK_SECONDS = 0.02


class DrainingServer(uvicorn.Server):
    """SIGTERM finishes all requests, for at most `drain`; SIGINT cuts them after two seconds, also during a drain.

    Args:
        config: with `timeout_graceful_shutdown=CUT_SECONDS`, `ws="none"` and `BoundedHttpProtocol`, which gives up a
            head that does not arrive.
        listener: bound; other processes may accept on it, too.
        drain: on SIGTERM replies that last longer are cut, and recorded as aborted.
        draining: called when the server begins to end. The sockets given to `serve` are open until the end.
    """

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, drain: timedelta, draining: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._drain_seconds = drain.total_seconds()
        self._limit_seconds = QUICK_SECONDS
        self._draining = draining
        self._connecting: set[asyncio.Task[object]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._limit_seconds = self._drain_seconds if sig == signal.SIGTERM else QUICK_SECONDS
        elif sig == signal.SIGINT and self._limit_seconds > QUICK_SECONDS:
            self._limit_seconds = QUICK_SECONDS
            return
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets or [])
        if not self.should_exit:
            self._listener.setblocking(False)
            self._listener.listen(QUEUED_CONNECTIONS)
            self._accept_next()

    def _accept_next(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another gateway was quicker, or the client has gone
        except OSError as error:
            log.error("no connection can be accepted", extra={"why": error.strerror})
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_RETRY_SECONDS, self._accept_next)
            return
        connecting = loop.create_task(loop.connect_accepted_socket(self._protocol, accepted))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        loop.remove_reader(self._listener.fileno())
        loop.call_later(PAUSE_SECONDS, self._accept_next)

    def _protocol(self) -> asyncio.Protocol:
        protocol = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._listener.close()
        # For requests that begin from now on. Those whose headers are not sent yet get it by `shutdown`.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        connections = cast(set[BoundedHttpProtocol], self.server_state.connections)
        for connection in list(connections):
            if connection.exchange is not None and not connection.exchange.response_started:
                connection.shutdown()
        began = loop.time()
        silent_since: dict[BoundedHttpProtocol, float] = {}
        while (connections or self._connecting) and not self.force_exit:
            if loop.time() >= began + self._limit_seconds:
                break
            for connection in list(connections):
                if _is_busy(connection):
                    silent_since.pop(connection, None)
                elif loop.time() >= silent_since.setdefault(connection, loop.time()) + SILENT_SECONDS:
                    _close_unless_it_speaks(connection.transport)
            await asyncio.sleep(_CHECK_SECONDS)
        await super().shutdown(sockets)


def _is_busy(connection: BoundedHttpProtocol) -> bool:
    """True if a request is being answered, or has begun to arrive."""
    return connection.is_in_head or (connection.exchange is not None and not connection.exchange.response_complete)


def _close_unless_it_speaks(transport: Transport) -> None:
    """Close a connection, unless it has input that the event loop has not read yet."""
    if transport.is_closing():
        return
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    if not poll.poll(0):
        transport.close()
