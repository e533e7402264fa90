"""The page in a browser: what a person does with mouse and keyboard, and what they see without reloading."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, expect

from db.content import advantages_to_bytes
from tests.browser.packages import axe_script
from tests.browser.picture import MOST_BYTES, take
from tests.browser.tab import PATIENT_MILLISECONDS, logged_in
from tests.contract.learning import POLICY, publish, reject, step
from tests.ui.conftest import Page as Served
from tests.ui.recorded import CHANGED, HINT, played_repair

pytestmark = [pytest.mark.long, pytest.mark.slow]

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

_TABLE = """() => {
    const table = document.querySelector("#history .scroll");
    return [table.scrollWidth > table.clientWidth, getComputedStyle(table).backgroundAttachment];
}"""


async def learned(served: Served) -> str:
    """A session that taught a version, one of a hostile model, a rejected version; the first session's address."""
    first, _ = await served.recorder.chat("first", "Explain the tides", CHANGED)
    await served.recorder.judge(first, -1, HINT)
    await served.recorder.chat("hostile", HOSTILE, HOSTILE, reply=HOSTILE)
    await step(served.learning, 1, count=3)
    advantages = advantages_to_bytes([0.5, -2.0, 1.0, None])
    await served.learning.execute("UPDATE step_samples SET advantages = %s", advantages)
    [engine] = await served.learning.rows("SELECT id FROM engines")
    await publish(served.learning, 1, engine["id"])
    await reject(served.learning, 2)
    [row] = await served.learning.rows("SELECT session_id FROM turns WHERE id = %s", first)
    return f"/ui/sessions/{row['session_id']}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
async def test_everybody_can_use_every_page(page: Served, browser: Browser, width: int, scheme: str) -> None:
    """axe-core finds nothing, nothing is cut at the side, and the console stays silent."""
    session = await learned(page)
    episode = await played_repair(page.learning, page.services[0].artifacts)
    paths = (
        "/ui",
        "/ui/sessions",
        session,
        "/ui/versions",
        "/ui/versions/1",
        "/ui/rollouts",
        f"/ui/episodes/{episode.id}",
        "/ui/engines",
        "/ui/settings",
        "/ui/probes",
        "/ui/start",
        "/ui/lessons",
        "/ui/login",
        "/ui/nothing",
    )
    await page.services[0].lesson_operations.add(POLICY, "Answer in one sentence.")
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    async with logged_in(browser, page, **options) as (tab, errors):
        for path in paths:
            await tab.goto(path)
            if path != "/ui/login":
                await expect(tab.locator("#live")).to_have_text("live", timeout=PATIENT_MILLISECONDS)
            if path == session:
                await tab.get_by_text("Its tokens, as the step trained them").click()
                await tab.get_by_text("As a table").click(timeout=PATIENT_MILLISECONDS)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width, path
            assert await _violations(tab) == [], path
        assert errors == ["Failed to load resource: the server responded with a status of 404 (Not Found)"]
        errors.clear()
        await tab.goto("/ui")
        # On a phone its table goes on at the side: two shadows stay, and what covers them at the ends scrolls.
        wider, shadows = await tab.evaluate(_TABLE)
        assert (wider, shadows) == (width == 375, "local, local, scroll, scroll")
        await expect(tab.locator("#chart canvas").first).to_be_visible(timeout=PATIENT_MILLISECONDS)
        assert errors == []


async def _violations(tab: Page) -> list[Any]:
    session = await tab.context.new_cdp_session(tab)
    # Past the page's own policy, which forbids scripts that are not its own.
    found = await session.send(
        "Runtime.evaluate",
        {
            "expression": f"{axe_script()};axe.run().then((found) => JSON.stringify("
            "found.violations.map((one) => [one.id, one.nodes.map((node) => node.html)])))",
            "awaitPromise": True,
            "returnByValue": True,
        },
    )
    return list(json.loads(found["result"]["value"]))


async def test_the_chart_is_drawn_in_a_browser_without_a_locale(page: Served, browser: Browser) -> None:
    """Its language is then one that it does not know itself."""
    await page.recorder.chat("s1", "Hello", "And more")
    async with logged_in(browser, page, locale=None) as (tab, errors):
        assert "@" in await tab.evaluate(
            "Object.getPrototypeOf(navigator).__lookupGetter__('language').call(navigator)"
        )
        await expect(tab.locator("#chart canvas").first).to_be_visible(timeout=PATIENT_MILLISECONDS)
        assert errors == []


_DRAWN = """
    window.drawn = [];
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (/^v\\d/.test(text)) drawn.push([text, x + this.measureText(text).width - this.canvas.width, y]);
        draw.apply(this, arguments);
    };"""


@pytest.mark.parametrize("width", [375, 1440])
async def test_versions_are_named_above_the_chart_and_beside_its_figures(
    page: Served, browser: Browser, width: int
) -> None:
    for version in range(3):
        turn, _ = await page.recorder.chat(f"of version {version}", "Hello", "And more", version=version)
        await page.recorder.judge(turn, 1)
    async with logged_in(browser, page, viewport={"width": width, "height": 900}) as (tab, errors):
        await tab.add_init_script(_DRAWN)
        await tab.goto("/ui")
        await expect(tab.locator("#chart canvas")).to_have_count(2, timeout=PATIENT_MILLISECONDS)
        top = await tab.locator(".u-over").first.evaluate("(plot) => plot.offsetTop * devicePixelRatio")
        drawn = await tab.evaluate("drawn")
        assert {text for text, _, _ in drawn} == {"v0", "v1", "v2"}
        # None is cut at the right, and none stands in the plot.
        assert all(over <= 0 and bottom < top for _, over, bottom in drawn), (top, drawn)
        await tab.locator("#chart").focus()
        await tab.keyboard.press("ArrowRight")
        await expect(tab.locator(".u-legend").first).to_contain_text("1, version 0")
        for _ in range(2):
            await tab.keyboard.press("ArrowRight")
        for legend in await tab.locator(".u-legend").all():
            await expect(legend).to_contain_text("3, version 1")
        assert errors == []


async def test_the_reply_that_taught_a_version_is_found_and_a_roll_back_is_seen_at_once(
    page: Served, browser: Browser
) -> None:
    await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        await tab.get_by_role("link", name="Sessions", exact=True).click()
        await tab.get_by_label("Said in it").fill("shorter")
        # The list follows what is typed.
        await expect(tab.locator(".cover")).to_have_count(1, timeout=PATIENT_MILLISECONDS)
        await tab.get_by_role("link", name="Explain the tides").click()
        await expect(tab.locator(".hint")).to_contain_text(HINT)
        await tab.get_by_text("The judges' words").click()
        await expect(tab.locator(".vote").first).to_contain_text("It was too long.")
        await tab.get_by_role("link", name="step 1").click()
        await expect(tab.get_by_role("heading", name="Version 1")).to_be_visible()
        await tab.get_by_role("button", name="Ask both").click()
        await expect(tab.locator("#compared .bubble")).to_have_count(2, timeout=PATIENT_MILLISECONDS)
        await expect(tab.locator("#compared")).to_contain_text("Hello there, friend.")

        await tab.get_by_role("link", name="Now", exact=True).click()
        await expect(tab.locator(".tile").first).to_contain_text("version 1")
        await tab.evaluate("window.stays = true")
        tab.on("dialog", lambda dialog: dialog.accept())
        await tab.get_by_label("Roll back to version").fill("0")
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#steering")).to_contain_text("Rolled back", timeout=PATIENT_MILLISECONDS)
        await expect(tab.locator(".tile").first).to_contain_text("version 0", timeout=PATIENT_MILLISECONDS)
        assert await tab.evaluate("window.stays") is True
        assert errors == []


async def test_a_search_is_saved_under_a_name_until_it_is_removed(page: Served, browser: Browser) -> None:
    await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        await tab.goto("/ui/sessions")
        await tab.get_by_role("link", name="Blamed").click()
        await expect(tab.locator(".cover")).to_have_text(["Explain the tides"])
        await tab.get_by_label("Said in it").fill("tides & moons")
        await tab.get_by_text("Save this search").click()
        await tab.get_by_label("Name of this search").fill("<b>Tides</b>")
        await tab.keyboard.press("Enter")
        await tab.goto("/ui/sessions")
        await tab.get_by_role("link", name="<b>Tides</b>").click()
        await expect(tab.get_by_label("Said in it")).to_have_value("tides & moons")
        await expect(tab.get_by_label("Verdict")).to_have_value("blamed")
        assert await _violations(tab) == []
        await tab.get_by_role("button", name="Remove the search <b>Tides</b>").click()
        await tab.reload()
        await expect(tab.get_by_role("link", name="Blamed")).to_be_visible()
        await expect(tab.locator("#saved *")).to_have_count(0)
        assert errors == []


async def test_a_picture_of_the_page_is_small_and_of_a_session(page: Served, browser: Browser) -> None:
    await learned(page)
    picture = await take(browser, page.url, page.admin_key)
    assert picture.startswith(b"\x89PNG")
    assert 10_000 < len(picture) <= MOST_BYTES
    committed = Path(__file__).resolve().parents[2] / "docs" / "demo" / "page.png"
    assert committed.stat().st_size <= MOST_BYTES


async def test_the_first_visit_ends_in_a_recorded_chat(page: Served, browser: Browser) -> None:
    async with logged_in(browser, page) as (tab, errors):
        await expect(tab.get_by_role("heading", name="Your first chat")).to_be_visible()
        await tab.get_by_role("button", name="Make a key").click()
        await expect(tab.locator("#key-made")).to_contain_text("Bearer cl-")
        await tab.get_by_label("Message").fill("Hello")
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#try-log .reply")).to_have_text("Hello there, friend.", timeout=PATIENT_MILLISECONDS)
        await expect(tab.locator("#try-recorded")).to_contain_text("waiting", timeout=PATIENT_MILLISECONDS)
        assert errors == []


async def test_what_a_model_wrote_is_never_run(page: Served, browser: Browser) -> None:
    await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        await tab.goto("/ui/sessions?text=owned")
        await tab.locator(".cover").first.click()
        await expect(tab.locator(".bubble .said").first).to_contain_text("<script>")
        await tab.get_by_role("button", name="Bad: rate turn 1 down").click()
        await expect(tab.get_by_text("rated -1")).to_be_visible()
        assert await tab.title() != "owned"
        assert await tab.locator("main img").count() == 0
        assert errors == []


async def test_what_a_person_writes_is_not_lost_when_the_page_follows(page: Served, browser: Browser) -> None:
    session = await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        await tab.goto(session)
        await tab.get_by_text("The judges' words").click()
        await tab.get_by_text("Comment", exact=True).first.click()
        await tab.get_by_label("Comment on turn 1").fill("Half a sent")
        await page.recorder.chat("another", "Something else")
        async with tab.expect_response(lambda answer: "/ui/sessions/" in answer.url):
            await page.recorder.chat("one more", "Something else")
        await expect(tab.get_by_label("Comment on turn 1")).to_have_value("Half a sent")
        await expect(tab.locator(".vote").first).to_be_visible()
        assert errors == []


async def test_what_is_done_is_seen_on_every_page_without_reload(page: Served, browser: Browser) -> None:
    await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        tab.on("dialog", lambda dialog: dialog.accept())
        await tab.goto("/ui/versions")
        await tab.evaluate("window.stays = true")
        await expect(tab.locator("#tree .active")).to_contain_text("v1")
        await tab.get_by_label("Roll back to version").fill("0")
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#tree .active")).to_contain_text("v0", timeout=PATIENT_MILLISECONDS)
        # What was told stays for a while, although the part that tells it is loaded anew.
        await expect(tab.locator("#steering-notes")).to_contain_text("Rolled back")
        assert await tab.evaluate("window.stays") is True
        await tab.goto("/ui/versions/1")
        await expect(tab.locator("#version-title .chip")).to_contain_text("rolled back")
        await tab.get_by_role("button", name="Go on from here").click()
        await expect(tab.locator("#version-title .chip")).to_contain_text("active", timeout=PATIENT_MILLISECONDS)
        assert errors == []


async def test_the_focus_of_a_keyboard_stays_where_it_is(page: Served, browser: Browser) -> None:
    session = await learned(page)
    async with logged_in(browser, page) as (tab, errors):
        await tab.goto(session)
        await expect(tab.locator("#live")).to_have_text("live", timeout=PATIENT_MILLISECONDS)
        await tab.get_by_text("The judges' words").focus()
        await tab.keyboard.press("Enter")
        async with tab.expect_response(lambda answer: "/ui/sessions/" in answer.url):
            await page.recorder.chat("one more", "Something else")
        await expect(tab.locator("details[open] > summary").first).to_be_focused()
        assert errors == []


async def test_what_a_button_is_answered_is_told_although_its_part_changed_meanwhile(
    page: Served, browser: Browser
) -> None:
    await learned(page)
    asked, pausing = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        asked.set()
        await pausing.wait()
        await route.continue_()

    async with logged_in(browser, page) as (tab, errors):
        await tab.goto("/ui")
        await tab.route("**/ui/training/pause*", hold)
        await tab.get_by_label("Pause training, because").fill("to look")
        await tab.get_by_role("button", name="Pause").click()
        await asyncio.wait_for(asked.wait(), 60)
        # Something happens, and the part is loaded anew, before the button has its answer.
        async with tab.expect_response(lambda answer: answer.url.endswith("/ui/training?policy=default")):
            await page.recorder.chat("meanwhile", "Something else")
        pausing.set()
        await expect(tab.locator("#steering-notes")).to_contain_text("Paused", timeout=PATIENT_MILLISECONDS)
        await expect(tab.get_by_role("button", name="Resume")).to_be_visible()
        assert errors == []


async def test_the_docs_show_the_routes_and_break_no_policy(page: Served, browser: Browser) -> None:
    """`/docs` asks no other server for anything."""
    context = await browser.new_context()
    tab = await context.new_page()
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    await tab.goto(f"{page.url}/docs", wait_until="commit")
    # Ten seconds on a machine that does much else.
    await tab.get_by_text("/v1/chat/completions", exact=True).first.wait_for(timeout=200_000)
    await context.close()
    assert said == []
    assert [url for url in asked if not url.startswith((page.url, "data:"))] == []
