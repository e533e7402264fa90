"""The page while PostgreSQL is away."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from api.ui.changes import AWAY, Changes
from api.ui.logins import COOKIE
from clawloop.core.contracts.answers import Counts
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import StoreUnavailable
from tests.api.conftest import Gateway
from tests.fakes.away_browser import AwayBrowser


async def log_in(gateway: Gateway, client: httpx.AsyncClient, key: str = "") -> httpx.Response:
    token = re.search(r'name="token" value="([^"]+)"', (await client.get("/ui/login")).text)
    assert token is not None
    return await client.post("/ui/login", data={"token": token[1], "key": key or gateway.admin_key})


async def test_it_says_so_and_tries_again(fresh_gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=fresh_gateway.url, timeout=120) as client:
        assert (await log_in(fresh_gateway, client)).status_code == 303
        answer = await client.get("/ui/versions")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "PostgreSQL does not answer" in answer.text
        assert '<meta http-equiv="refresh"' in answer.text
        part = await client.get("/ui/now", headers={"HX-Request": "true"})
        assert (part.status_code, "looks again by itself" in part.text) == (503, True)
        async with client.stream("GET", "/ui/events") as events:
            async for line in events.aiter_lines():
                if line.startswith("event"):
                    assert line == "event: away"
                    break


async def test_nothing_is_read_from_a_database_that_did_not_answer_a_moment_ago(fresh_gateway: Gateway) -> None:
    """It may be silent, and then a page would be answered after half a minute."""
    asked: list[str] = []

    class Silent(AwayBrowser):
        async def counts(self, policy: str) -> Counts:
            asked.append(policy)
            return await super().counts(policy)

    fresh_gateway.services.training_browser = Silent()
    async with httpx.AsyncClient(base_url=fresh_gateway.url, timeout=120) as client:
        await log_in(fresh_gateway, client)
        for path in ("/ui", "/ui/engines", "/ui/start"):
            assert (await client.get(path)).status_code == 503, path
        assert asked == []
        # Chats of the page go on: they are refused for their form alone.
        chat = await client.post("/ui/chat", json={}, headers={"X-CSRF-Token": "0" * 64})
        assert chat.status_code == 403
        out = await client.post("/ui/logout")
        assert out.status_code == 403  # without the token of the login; not 503


async def test_a_login_outlives_the_outage_and_a_new_one_waits(fresh_gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=fresh_gateway.url, timeout=120) as client:
        await log_in(fresh_gateway, client)
        other = fresh_gateway.keys.add("default", {Scope.ADMIN})
        fresh_gateway.keys.available = False
        assert await fresh_gateway.services.logins.find(client.cookies[COOKIE]) is not None
        client.cookies.clear()
        refused = await log_in(fresh_gateway, client, other)
        assert (refused.status_code, "The database does not answer" in refused.text) == (503, True)


async def test_a_page_asked_in_the_second_in_which_postgresql_falls_silent_says_so(
    fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FallsSilent(AwayBrowser):
        """Its marks are read until a page begins to read, which never ends."""

        silent = False

        async def mark(self) -> str:
            return await super().mark() if self.silent else "same"

        async def counts(self, policy: str) -> Counts:
            self.silent = True
            await asyncio.Event().wait()
            return await super().counts(policy)

    monkeypatch.setattr("api.ui.changes.CHECK_SECONDS", 0.01)
    fresh_gateway.services.training_browser = browser = FallsSilent()
    fresh_gateway.services.changes = Changes(browser)
    async with httpx.AsyncClient(base_url=fresh_gateway.url, timeout=120) as client:
        await log_in(fresh_gateway, client)
        answer = await client.get("/ui/start")
        assert browser.silent
        assert (answer.status_code, "PostgreSQL does not answer" in answer.text) == (503, True)


async def test_a_change_asked_in_that_second_is_answered_and_never_cut_off(
    fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, back, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class FallsSilent(AwayBrowser):
        async def mark(self) -> str:
            return await super().mark() if begun.is_set() else "same"

    class Operations:
        async def drain(self, engine: str, *, undo: bool, force: bool) -> None:
            begun.set()
            await back.wait()
            done.set()

    monkeypatch.setattr("api.ui.changes.CHECK_SECONDS", 0.01)
    browser = FallsSilent()
    fresh_gateway.services.training_browser = browser
    fresh_gateway.services.changes = Changes(browser)
    monkeypatch.setattr(fresh_gateway.services, "engine_operations", Operations())
    async with httpx.AsyncClient(base_url=fresh_gateway.url, timeout=120) as client:
        await log_in(fresh_gateway, client)
        login = await fresh_gateway.services.logins.find(client.cookies[COOKIE])
        assert login is not None
        headers = {"X-CSRF-Token": login.csrf, "HX-Request": "true"}
        answer = await client.post("/ui/engines/e0/drain", headers=headers)
        assert (answer.status_code, "check whether this was done" in answer.text) == (503, True)
        # Nor is it taken away once PostgreSQL is back: nobody else says whether it was done.
        assert "data-away" not in answer.text
        assert not done.is_set()
        back.set()
        async with asyncio.timeout(60):
            await done.wait()


async def test_what_needs_no_database_is_answered_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ui.changes.CHECK_SECONDS", 0.0)
    changes = Changes(AwayBrowser())

    async def slow() -> str:
        for _ in range(5):
            assert await changes.mark() == AWAY
        return "done"

    assert await changes.unless_away(slow(), lambda: False) == "done"
    with pytest.raises(StoreUnavailable):
        await changes.unless_away(asyncio.sleep(3600), lambda: True)
