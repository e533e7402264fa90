"""The `/metrics` page of a gateway, with the series of the gateways that share its socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest

from clawloop.core.telemetry.metrics import LabelledRegistry, merge_pages, page_of

log = logging.getLogger(__name__)

# A gateway on this machine answers in milliseconds; one that hangs must not fail the others' page.
_PEER_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class GatewayPages:
    """Prometheus' text of this gateway and those on the same socket.

    Args:
        name: labels each series; None: no label.
        health_port: on it the page is of this process alone; 0: it has none.
        peers: health ports of the gateways on the same socket.
    """

    def __init__(self, registry: CollectorRegistry, name: str | None, health_port: int, peers: Sequence[int]) -> None:
        self._registry = registry
        self._name = name
        self._health_port = health_port
        self._peers = peers

    async def page(self, port: int | None) -> bytes:
        """Prometheus' text format, for a request that came to this port of the gateway."""
        own = self._own_page()
        if not self._peers or port == self._health_port:
            return own
        async with aiohttp.ClientSession(timeout=_PEER_TIMEOUT) as client:
            others = await asyncio.gather(*(_page_of_peer(client, peer) for peer in self._peers))
        return merge_pages([own, *(page for page in others if page is not None)])

    def _own_page(self) -> bytes:
        if self._name is None:
            return generate_latest(self._registry)
        return page_of(LabelledRegistry(self._registry, "gateway", self._name))


async def _page_of_peer(client: aiohttp.ClientSession, port: int) -> bytes | None:
    """The metrics of another gateway; None while it does not answer, as during its restart."""
    try:
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            answer.raise_for_status()
            return await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        log.info("a gateway's metrics are missing", extra={"port": port, "why": str(error)})
        return None
