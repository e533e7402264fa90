"""A browser's tab in which somebody is logged in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, expect

from tests.ui.conftest import Page as Served

# A busy machine must not fail a test.
PATIENT_MILLISECONDS = 60_000


@asynccontextmanager
async def logged_in(browser: Browser, served: Served, **options: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A tab of somebody who logged in, and the errors of its console."""
    context = await browser.new_context(base_url=served.url, **{"locale": "en-US"} | options)
    context.set_default_timeout(PATIENT_MILLISECONDS)
    tab, errors = await context.new_page(), list[str]()
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    await tab.goto("/ui/login")
    # By keyboard alone: the field has the focus, once the browser has given it.
    await expect(tab.locator("input[name=key]")).to_be_focused(timeout=PATIENT_MILLISECONDS)
    await tab.keyboard.type(served.admin_key)
    await tab.keyboard.press("Enter")
    await tab.wait_for_url(lambda url: not url.endswith("/login"))
    yield tab, errors
    await context.close()
