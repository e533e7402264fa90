"""Who may see the page, and who may change something on it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import httpx

import api.ui.logins as logins
from api.ui.logins import COOKIE
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import RequestRejected
from db.serving.keys import PostgresKeyStore
from tests.contract.learning import POLICY
from tests.ui.conftest import Page, Visitor

ASSETS = Path(logins.__file__).parent / "assets"


async def test_without_a_login_everything_leads_to_the_form(page: Page) -> None:
    async with httpx.AsyncClient(base_url=page.url) as client:
        for path in ("/ui", "/ui/sessions", "/ui/versions", "/ui/engines", "/ui/start", "/ui/chart", "/ui/events"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login"), path
        part = await client.get("/ui/now", headers={"HX-Request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/ui/login")
        # A strict cookie stays behind when another site led here: the page asks itself once more.
        led_here = await client.get("/ui", headers={"Sec-Fetch-Site": "cross-site"})
        assert 'http-equiv="refresh"' in led_here.text


async def test_the_cookie_is_for_this_page_alone(page: Page) -> None:
    async with httpx.AsyncClient(base_url=page.url) as client:
        cookie = (await Visitor(client).log_in(page.admin_key)).headers["set-cookie"]
    found = next(line for line in cookie.split(", ") if COOKIE in line)
    assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= {part.strip() for part in found.split(";")}
    assert page.admin_key not in cookie


async def test_another_gateway_takes_the_same_cookie(page: Page) -> None:
    """Nothing of a login is kept: what signs the cookie is in PostgreSQL."""
    async with page.visitor() as visitor:
        cookie = visitor.client.cookies[COOKIE]
    services = page.services[0]
    other = logins.Logins(services.keys, PostgresKeyStore(page.learning.database))
    login = await other.find(cookie)
    assert login is not None
    assert (login.may_write, login.csrf) == (True, visitor.csrf)


async def test_a_forged_or_expired_cookie_is_no_login(page: Page) -> None:
    async with page.visitor() as visitor:
        cookie = visitor.client.cookies[COOKIE]
    prefix, expires, nonce, signature = cookie.split(".")
    found = page.services[0].logins
    assert await found.find(cookie) is not None
    for forged in (
        f"{prefix}.{int(expires) + 1}.{nonce}.{signature}",
        f"{prefix}.1.{nonce}.{signature}",
        f"{prefix}.{expires}.{nonce}.{'0' * 64}",
        f"cl-00000000.{expires}.{nonce}.{signature}",
        "nonsense",
        "",
    ):
        assert await found.find(forged) is None, forged


async def test_a_revoked_key_ends_its_logins(page: Page) -> None:
    async with page.visitor() as visitor:
        cookie = visitor.client.cookies[COOKIE]
    store = PostgresKeyStore(page.learning.database)
    await store.revoke("-".join(page.admin_key.split("-")[:2]))
    assert await logins.Logins(page.services[0].keys, store).find(cookie) is None


async def test_a_chat_key_is_refused_and_too_many_tries_are_stopped(page: Page) -> None:
    store = PostgresKeyStore(page.learning.database)
    _, chat = await store.create_key(POLICY, {Scope.CHAT}, "chat")
    async with httpx.AsyncClient(base_url=page.url) as client:
        visitor = Visitor(client)
        assert (await visitor.log_in(chat)).status_code == 401
        for _ in range(logins.FAILURES_PER_MINUTE - 1):
            assert (await visitor.log_in("cl-00000000-wrong")).status_code == 401
        stopped = await visitor.log_in(page.admin_key)
        assert stopped.status_code == 429
        assert int(stopped.headers["retry-after"]) > 0


async def test_a_form_without_its_token_changes_nothing(page: Page) -> None:
    async with page.visitor() as visitor:
        csrf, visitor.csrf = visitor.csrf, "0" * 64
        refused = await visitor.post("/ui/training/pause", reason="x")
        assert (refused.status_code, "Load the page again" in refused.text) == (403, True)
        assert (await page.learning.operators.status(POLICY)).state == "waiting"
        visitor.csrf = csrf
        assert (await visitor.post("/ui/training/pause", reason="x")).status_code == 200
        assert (await page.learning.operators.status(POLICY)).state == "paused"


async def test_a_login_form_without_its_token_is_refused(page: Page) -> None:
    async with httpx.AsyncClient(base_url=page.url) as client:
        answer = await client.post("/ui/login", data={"key": page.admin_key})
        assert answer.status_code == 403
        assert COOKIE not in client.cookies


async def test_a_key_that_only_reads_sees_all_and_changes_nothing(page: Page) -> None:
    [turn] = await page.recorder.chat("s1", "Hello")
    async with page.visitor(page.read_key) as visitor:
        paths = ("/ui", "/ui/sessions", "/ui/versions", "/ui/versions/0", "/ui/engines", "/ui/settings", "/ui/start")
        for path in (*paths, "/ui/rollouts"):
            shown = await visitor.get(path)
            assert "hx-post" not in shown.replace('hx-post="/ui/logout"', ""), path
        for path in ("/ui/training/pause", f"/ui/turns/{turn}/erase", "/ui/keys"):
            refused = await visitor.post(path, reason="x")
            assert (refused.status_code, "can look and change nothing" in refused.text) == (403, True), path
        assert (await visitor.post("/ui/chat")).status_code == 403
        assert (await visitor.post("/ui/logout")).headers["hx-redirect"] == "/ui/login"


async def test_every_page_allows_nothing_from_elsewhere_and_nothing_inline(page: Page) -> None:
    await page.recorder.chat("s1", "Hello")
    async with page.visitor() as visitor:
        for path in ("/ui", "/ui/sessions", "/ui/versions", "/ui/engines", "/ui/start", "/ui/login"):
            answer = await visitor.client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["cache-control"] == "no-store"
            assert " style=" not in answer.text
            assert " onclick=" not in answer.text
            assert "<script>" not in answer.text
            assert "http://" not in answer.text.replace(page.url, "").replace(page.engine.url, ""), path
            assert "https://" not in answer.text, path


async def test_the_assets_are_those_that_were_taken(page: Page) -> None:
    for line in (ASSETS / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest, name
    async with httpx.AsyncClient(base_url=page.url) as client:
        script = await client.get("/ui/assets/htmx.min.js")
        assert script.content == (ASSETS / "htmx.min.js").read_bytes()
        assert "immutable" in script.headers["cache-control"]
        assert (await client.get("/ui/assets/README.md")).status_code == 404
        assert (await client.get("/ui/assets/..%2Flogins.py")).status_code == 404


async def test_many_tries_at_once_are_stopped_as_well(page: Page) -> None:
    found = page.services[0].logins
    lookups = [found.open(f"cl-{number:08x}-wrong", "10.0.0.9") for number in range(3 * logins.FAILURES_PER_MINUTE)]
    refused = await asyncio.gather(*lookups, return_exceptions=True)
    statuses = [error.status for error in refused if isinstance(error, RequestRejected)]
    assert sorted(statuses) == [401] * logins.FAILURES_PER_MINUTE + [429] * 2 * logins.FAILURES_PER_MINUTE
    assert await found.open(page.admin_key, "10.0.0.8")
    for _ in range(2 * logins.FAILURES_PER_MINUTE):  # what is not refused does not count
        await found.open(page.admin_key, "10.0.0.8")


async def test_refused_keys_count_for_the_client_behind_a_proxy(page: Page) -> None:
    async with httpx.AsyncClient(base_url=page.url) as client:  # from 127.0.0.1, which is trusted
        visitor = Visitor(client)
        client.headers.update({"X-Forwarded-For": "203.0.113.5"})
        for _ in range(logins.FAILURES_PER_MINUTE):
            assert (await visitor.log_in("cl-00000000-wrong")).status_code == 401
        assert (await visitor.log_in("cl-00000000-wrong")).status_code == 429
        client.headers.update({"X-Forwarded-For": "203.0.113.6"})
        assert (await visitor.log_in("cl-00000000-wrong")).status_code == 401
        for scheme in ("http", "https"):
            answer = await client.get("/ui/login", headers={"X-Forwarded-Proto": scheme})
            assert ("Secure" in answer.headers["set-cookie"]) == (scheme == "https")
