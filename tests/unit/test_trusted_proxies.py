"""Whose word the gateway takes for the client's address and scheme."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from clawloop.app.processes.gateway import server_config
from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings, read_settings


async def seen(settings: Settings, peer: str, forwarded: str) -> tuple[str, str]:
    """The client and scheme that the application sees of a request from `peer`."""
    found: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scope)

    config = server_config(app, settings)
    config.load()
    headers = [(b"x-forwarded-for", forwarded.encode()), (b"x-forwarded-proto", b"https")]
    scope: Any = {"type": "http", "scheme": "http", "client": (peer, 5), "headers": headers}
    await config.loaded_app(scope, None, None)
    return found["client"][0], found["scheme"]


async def test_only_a_proxy_of_this_machine_is_believed_unless_others_are_named() -> None:
    default = Settings()
    assert await seen(default, "127.0.0.1", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(default, "::1", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(default, "10.0.0.7", "203.0.113.5") == ("10.0.0.7", "http")


async def test_named_proxies_are_believed_and_their_clients_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TRUSTED_PROXIES", "10.0.0.0/24, 192.0.2.9")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own, which Clawloop does not read
    settings = read_settings()
    assert await seen(settings, "10.0.0.7", "203.0.113.5") == ("203.0.113.5", "https")
    assert await seen(settings, "10.0.0.7", "1.2.3.4, 203.0.113.5, 192.0.2.9") == ("203.0.113.5", "https")
    assert await seen(settings, "127.0.0.1", "203.0.113.5") == ("127.0.0.1", "http")


@pytest.mark.parametrize("given", ["*", "proxy.example.org", "10.0.0.1/8", "10.0.0.1,nonsense"])
def test_what_is_no_address_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TRUSTED_PROXIES", given)
    with pytest.raises(SetupError, match="CLAWLOOP_TRUSTED_PROXIES"):
        read_settings()
