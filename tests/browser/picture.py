"""Takes the picture of the page that the README and the documents show, from a demo that runs:

    make demo ARGS="--quick --keep"
    python -m tests.browser.picture http://127.0.0.1:PORT ADMIN_KEY docs/demo/page.png

It is the newest session with a blamed reply; `--path` chooses another part of the page.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from playwright.async_api import Browser, ViewportSize

from tests.browser.conftest import running_browser

# As wide as the documents show it sharply, and as high as two replies with their verdicts.
_SIZE: ViewportSize = {"width": 1280, "height": 900}
_PATH = "/ui/sessions?verdict=blamed"
MOST_BYTES = 200_000  # of a picture in the repository


async def take(browser: Browser, url: str, key: str, path: str = _PATH) -> bytes:
    """A PNG of a part of the page, as somebody with this key sees it; of a list's first session if it is one."""
    context = await browser.new_context(base_url=url, viewport=_SIZE, color_scheme="light")
    tab = await context.new_page()
    await tab.goto("/ui/login")
    await tab.locator("input[name=key]").fill(key)
    await tab.keyboard.press("Enter")
    await tab.wait_for_url(lambda address: not address.endswith("/login"))
    await tab.goto(path)
    if await tab.locator(".cover").count():
        await tab.locator(".cover").first.click()
        await tab.locator("#chat").wait_for()
    await tab.locator("#live.on").wait_for()  # else the picture shows a page that looks dead
    picture = await tab.screenshot(animations="disabled")
    await context.close()
    if len(picture) > MOST_BYTES:
        raise ValueError(f"the picture has {len(picture):,} bytes, {MOST_BYTES:,} are the most")
    return picture


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("out", type=Path)
    parser.add_argument("--path", default=_PATH)
    options = parser.parse_args()
    async with running_browser() as browser:
        options.out.write_bytes(await take(browser, options.url, options.key, options.path))


if __name__ == "__main__":
    asyncio.run(main())
