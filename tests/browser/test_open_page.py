"""A page that stays open: through an hour, a gateway that drains, a database that is away, and a login that ends."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from api.ui.changes import Changes
from tests.browser.tab import PATIENT_MILLISECONDS, logged_in
from tests.contract.learning import step
from tests.fakes.away_browser import AwayBrowser
from tests.ui.conftest import Page as Served

pytestmark = [pytest.mark.long, pytest.mark.slow]


async def shows(tab: Page, words: str) -> None:
    """The sign of the connection."""
    await expect(tab.locator("#live")).to_have_text(words, timeout=PATIENT_MILLISECONDS)


async def test_what_is_shown_grows_old_with_the_hours(
    page: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ui.events.AGING_SECONDS", 0.1)
    await page.recorder.chat("s1", "Hello")
    await step(page.learning, 1)
    async with logged_in(browser, page) as (tab, errors):
        made = tab.locator("#history tr", has=tab.get_by_role("link", name="v1")).locator("th")
        await expect(made).to_be_visible(timeout=PATIENT_MILLISECONDS)
        assert "hour" not in await made.inner_text()
        await tab.evaluate("window.stays = true")
        # Nothing happens in the ledger: time passes.
        await page.learning.execute("UPDATE versions SET created_at = created_at - interval '1 hour'")
        await expect(made).to_contain_text("1 hour ago", timeout=PATIENT_MILLISECONDS)
        assert await tab.evaluate("window.stays") is True
        assert errors == []


async def test_an_open_page_connects_again_once_a_gateway_has_drained(page: Served, browser: Browser) -> None:
    await page.recorder.chat("s1", "Hello")
    async with logged_in(browser, page) as (tab, _):
        await tab.goto("/ui/sessions")
        await shows(tab, "live")
        await tab.evaluate("window.stays = true")
        page.draining.append(True)
        await shows(tab, "connecting …")
        await page.recorder.chat("s2", "Said while nothing was connected")
        page.draining.clear()  # as of the gateway that took its place
        await shows(tab, "live")
        await expect(tab.locator("#sessions")).to_contain_text("nothing was connected", timeout=PATIENT_MILLISECONDS)
        assert await tab.evaluate("window.stays") is True


async def test_an_open_page_says_that_postgresql_is_away_and_follows_again_once_it_is_back(
    page: Served, browser: Browser
) -> None:
    await page.recorder.chat("s1", "Hello")
    services = page.services[0]
    async with logged_in(browser, page) as (tab, _):
        await tab.goto("/ui/sessions")
        await shows(tab, "live")
        await tab.evaluate("window.stays = true")
        there, services.changes = services.changes, Changes(AwayBrowser())
        await shows(tab, "PostgreSQL away")
        # What was read stays readable; what is asked for now is refused with a word.
        await expect(tab.locator("#sessions")).to_contain_text("Hello")
        await tab.get_by_label("Verdict").select_option("blamed")
        notice = tab.locator("#notice")
        await expect(notice).to_contain_text("PostgreSQL does not answer", timeout=PATIENT_MILLISECONDS)
        opened = await tab.context.new_page()
        await opened.goto("/ui/versions")
        await expect(opened.get_by_text("PostgreSQL does not answer")).to_be_visible()
        await page.recorder.chat("s2", "Said meanwhile")
        services.changes = there
        await shows(tab, "live")
        await expect(tab.locator("#sessions")).to_contain_text("Said meanwhile", timeout=PATIENT_MILLISECONDS)
        await expect(notice).not_to_contain_text("PostgreSQL", timeout=PATIENT_MILLISECONDS)
        assert await tab.evaluate("window.stays") is True
        # The page that said so loads itself again.
        await expect(opened.get_by_role("heading", name="Why did my agent change?")).to_be_visible(
            timeout=PATIENT_MILLISECONDS
        )


async def test_a_login_that_ended_leads_to_the_form(page: Served, browser: Browser) -> None:
    await page.recorder.chat("s1", "Hello")
    async with logged_in(browser, page) as (tab, _):
        await tab.goto("/ui/sessions")
        await shows(tab, "live")
        await tab.context.clear_cookies()
        page.draining.append(True)  # the stream ends, as it does when its login expires
        await expect(tab.locator("input[name=key]")).to_be_visible(timeout=PATIENT_MILLISECONDS)
    page.draining.clear()
    async with logged_in(browser, page) as (tab, _):
        await tab.goto("/ui/sessions")
        await tab.context.clear_cookies()
        await tab.get_by_label("Said in it").fill("hello")
        await expect(tab.locator("input[name=key]")).to_be_visible(timeout=PATIENT_MILLISECONDS)
