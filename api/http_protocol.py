"""uvicorn's HTTP protocol with bounds on a request's head: its bytes, its lines and the time it takes to arrive.

uvicorn has such a bound for its other parser only, h11, which is several times slower. Without one a head of 48 MB
takes the event loop 19 s, and a connection may wait for the rest of a head for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from api.errors import Problem

# nginx takes 32 KiB, Apache 100 lines. OpenClaw sends less than 2 KiB in 20 lines.
HEAD_BYTES = 64 * 1024
HEAD_LINES = 128
# A head is one or two packets; 30 s leave time for several losses on a bad line.
HEAD_SECONDS = 30.0
# Longest time an answer waits for its client. The kernel buffers some MB of it, so a client that reads less than some
# KB a second is cut off too.
# Chats whose client does not read end sooner, by a setting.
STALLED_SECONDS = 600.0

_TOO_LARGE = f"The request's line and headers exceed {HEAD_BYTES // 1024} KiB or {HEAD_LINES} headers. Send fewer."
_TOO_SLOW = f"The request's headers did not arrive within {HEAD_SECONDS:.0f} s."


class _HeadTooLarge(Exception):
    """Ends the parser's work on a head with too many lines."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large and 408 to one that arrives too slowly, and closes the connection; and
    closes one whose client takes nothing of an answer.

    Attributes:
        is_in_head: a part of a head has arrived, and the rest is awaited.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_in_head = False
        self._reading_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._bytes_since_body = 0
        self._rest_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    @property
    def exchange(self) -> RequestResponseCycle | None:
        """The newest request and its answer; None before the first, which uvicorn's type of `cycle` leaves out."""
        return self.cycle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_rest_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._reading_head:
            # The parser gets no byte over the bound: it joins the parts of a long header in quadratic time.
            self._start_head_timer()
            room = HEAD_BYTES - self._head_bytes
            head, data = data[:room], data[room:]
            self._head_bytes += len(head)
            super().data_received(head)
            if not data or self.transport.is_closing():
                return
            if self._reading_head:
                self._refuse(Problem(431, _TOO_LARGE, "headers_too_large"))
                return
        # Between and after the chunks of a body: sizes, extensions and trailers, which are joined as headers are.
        self._bytes_since_body += len(data)
        super().data_received(data)
        if self._bytes_since_body > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_in_head = True
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEAD_LINES:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head, self.is_in_head, self._bytes_since_body = False, False, 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_since_body = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._reading_head and self._rest_timer is None:
            # The answer is sent, and the rest of the request's body may never come.
            self._rest_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_message_complete(self) -> None:
        self._stop_rest_timer()
        super().on_message_complete()
        self._reading_head, self._head_bytes, self._bytes_since_body = True, 0, 0

    def send_400_response(self, msg: str) -> None:
        if self._reading_head and len(self.headers or ()) >= HEAD_LINES:
            self._refuse(Problem(431, _TOO_LARGE, "headers_too_large"))
        else:
            self._refuse(Problem(400, "This is not an HTTP/1.1 request.", "invalid_http"))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            problem = Problem(408, _TOO_SLOW, "upload_timeout")
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, problem)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _watch_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALLED_SECONDS, self._end_if_stalled, waiting)

    def _end_if_stalled(self, waited: int) -> None:
        # Nothing is written while writing is paused, so what waits becomes less as soon as the client reads.
        if self.transport.get_write_buffer_size() < waited:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, problem: Problem) -> None:
        self._stop_head_timer()
        earlier = self.exchange
        if earlier is not None and not earlier.response_complete:
            # The answer to the request before is still being sent; the connection is closed after it.
            self.flow.pause_reading()
            earlier.keep_alive = False
            return
        body = problem.openai()
        head = (
            STATUS_LINE[problem.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        )
        self.transport.write(b"".join(head) + body)
        self.transport.close()
