"""Passes the requests of verifiers' one client to the gateway, each with the key of its episode.

verifiers keeps a client for each endpoint and key, for good. So all rollouts have this relay as their endpoint, and it
knows them by the header that verifiers adds to each request, the id of the rollout's trace.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

SESSION_HEADER = "X-Session-ID"
# Longer than the gateway holds requests while an engine restarts, as our own agent waits.
PATIENCE_SECONDS = 180.0
_LONGEST_PAUSE = 10.0
_AGAIN = (429, 502, 503, 504)
_BODY_BYTES = 32 * 2**20
# They are of one connection, or are made anew.
_OWN_HEADERS = {"authorization", "x-api-key", "host", "connection", "content-length", "transfer-encoding", "keep-alive"}


class KeyRelay:
    """
    Args:
        gateway: its URL, without a path.
        patience_seconds: how long a request is repeated while the gateway does not answer.
    """

    def __init__(self, gateway: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._gateway = gateway.rstrip("/")
        self._patience_seconds = patience_seconds
        self._keys: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port of loopback while the block runs; yields the base URL."""
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        # Each rollout waits for its own reply: a limit below their number would add to the time of all.
        connector = aiohttp.TCPConnector(limit=0)
        # The gateway ends a request that hangs; a rollout has its own time limit.
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        # Replies stay packed as the gateway sent them.
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()

    def admit(self, trace: str, key: str) -> None:
        """Pass on requests of this rollout from now on."""
        self._keys[trace] = key

    def dismiss(self, trace: str) -> None:
        self._keys.pop(trace, None)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        key = self._keys.get(request.headers.get(SESSION_HEADER, ""))
        if key is None:
            return web.json_response({"error": {"message": "no rollout of this worker that runs"}}, status=401)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}
        headers["Authorization"] = f"Bearer {key}"
        body = await request.read()
        until, pause = time.monotonic() + self._patience_seconds, 0.5
        while True:
            try:
                return await self._pass_once(request, headers, body, may_repeat=time.monotonic() < until)
            except _NotNow:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _pass_once(
        self, request: web.Request, headers: dict[str, str], body: bytes, *, may_repeat: bool
    ) -> web.StreamResponse:
        """
        Raises:
            _NotNow: the gateway has no answer now, and nothing was passed back.
        """
        assert self._session is not None
        url = f"{self._gateway}{request.rel_url}"
        reply: web.StreamResponse | None = None
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                if answer.status in _AGAIN and may_repeat:
                    raise _NotNow
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
                reply = web.StreamResponse(status=answer.status, headers=kept)
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
                return reply
        except (aiohttp.ClientError, TimeoutError) as error:
            if reply is not None:
                raise  # the rollout sees a reply that breaks off, and decides itself
            if may_repeat:
                raise _NotNow from error
            return web.json_response({"error": {"message": "the gateway does not answer"}}, status=503)


class _NotNow(Exception):
    """The same request may be answered later."""
