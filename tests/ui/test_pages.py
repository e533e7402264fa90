"""The page: what it shows of sessions, versions and rollouts."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi.routing import APIRoute

from api.app import create_app
from api.ui.now import probes_of
from clawloop.app.processes.operations import NoTemporal
from clawloop.core.contracts.serving import KeyLimits
from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import CheckResult, GateCheck, Pace, StepState, VersionView
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.judging.records import HINTS
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import WITHOUT_JUDGE, Gate, Lessons
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.playing import packed
from clawloop.operations.file_changes import MOST_FILES, TEXT_CHARACTERS, Change, changes_of
from clawloop.operations.workflow_links import WorkflowLinks
from db.training.policies import PostgresMeasurements
from tests.contract.episodes import run_group
from tests.contract.learning import POLICY, RECIPE, commit, publish, recipe, reject, step, trained
from tests.pictures import asks_about, image_part, png
from tests.records import turn_record
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT, played_repair
from tests.verbs import clawloop, refusal

# What the page shows of sessions, replies and versions, and what its buttons do.

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\" ' </div> {{7777*7777}} \u202e\0"


async def session_of(page: Page, turn: TurnId) -> str:
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
    return str(row["session_id"])


async def judged(page: Page, session: str, verdict: Vote, hint: str | None = None) -> TurnId:
    first, _ = await page.recorder.chat(session, f"Explain {session}", CHANGED)
    await page.recorder.judge(first, verdict, hint)
    return first


async def test_a_session_reads_as_a_chat_with_all_that_was_decided(page: Page) -> None:
    turn = await judged(page, "s1", -1, HINT)
    await page.learning.execute("UPDATE sessions SET closed_why = 'by `one`', guarantee = 'has a sample'")
    async with page.visitor() as visitor:
        shown = html.unescape(await visitor.get(f"/ui/sessions/{await session_of(page, turn)}"))
    assert "by <code>one</code>" in shown
    assert "<dt>Learned from</dt><dd>at least one reply</dd>" in shown
    assert '<dt>Name given by the program</dt><dd class="break" title="x-session-id">s1</dd>' in shown
    for words in ("Explain s1", "A long answer. (1)", CHANGED, "▼ blamed", HINT, "It was too long.", "verdict bad"):
        assert words in shown, words
    assert "3 votes, 1 on a hint" in shown
    assert "waits for a step" in shown
    # The second request holds the first conversation: it is shown once.
    assert shown.count('<div class="said" dir="auto">Explain s1') == 1


async def test_sessions_are_found_by_what_was_said_and_decided(page: Page) -> None:
    await judged(page, "blamed-one", -1, HINT)
    await judged(page, "praised-one", 1)
    await page.recorder.chat("waiting-one", 'Nothing is known of 100% of_this "quoted" Grüße', version=3)
    side = SessionEvidence(SessionSource.HEADER, "side-one")
    said: list[Message] = [{"role": "user", "content": "name this chat"}]
    await page.recorder.turn(said, {"role": "assistant", "content": "ok"}, evidence=side, kind=TurnKind.SIDE)
    names = ("blamed-one", "praised-one", "waiting-one", "side-one")

    async with page.visitor() as visitor:

        async def found(query: str) -> set[str]:
            shown = await visitor.get(f"/ui/sessions?{query}")
            return {name for name in names if f"· {name}" in shown}

        assert await found("") == set(names) - {"side-one"}
        assert await found("text=name+this+chat") == {"side-one"}
        assert await found("outcome=side") == {"side-one"}
        assert await found("verdict=blamed") == {"blamed-one"}
        assert await found("verdict=praised") == {"praised-one"}
        assert await found("text=SHORTER") == {"blamed-one", "praised-one"}
        assert await found("text=100%25+of_this") == {"waiting-one"}
        assert await found('text=this+"quoted"') == {"waiting-one"}
        assert await found("text=gr%C3%BC%C3%9Fe") == {"waiting-one"}
        assert await found("text=100x") == set()
        assert await found("version=3") == {"waiting-one"}
        assert await found("kind=side") == {"side-one"}
        assert await found("outcome=sampled") == {"blamed-one", "praised-one"}
        assert await found("outcome=sampled&verdict=praised&text=explain") == {"praised-one"}
        assert await found("state=closed") == set()
        refused = await visitor.client.get("/ui/sessions?outcome=nonsense")
        assert (refused.status_code, "<code>outcome</code> cannot be" in refused.text) == (400, True)


async def test_a_long_list_and_a_long_session_have_pages(page: Page) -> None:
    for number in range(52):
        await page.recorder.chat(f"s{number:02}", f"words {number:02}")
    turns = await page.recorder.chat("long", *(f"line {number:03}" for number in range(60)))
    async with page.visitor() as visitor:
        first = await visitor.get("/ui/sessions")
        assert first.count('class="cover"') == 50
        older = html.unescape(first.split('<a href="/ui/sessions?')[-1].split('"')[0])
        second = await visitor.get(f"/ui/sessions?{older}")
        assert second.count('class="cover"') == 3
        address = f"/ui/sessions/{await session_of(page, turns[0])}"
        assert (await visitor.get(address)).count("<article") == 50
        assert (await visitor.get(f"{address}?page=2")).count("<article") == 10
        # A link to a turn leads to the page that has it.
        assert f"turn-{turns[-1]}" in await visitor.get(f"{address}?turn={turns[-1]}")


async def test_what_a_model_says_is_text(page: Page) -> None:
    turn = (await page.recorder.chat("s1", HOSTILE, HOSTILE, reply=HOSTILE))[0]
    await page.recorder.judge(turn, -1, HOSTILE.replace("\0", ""), raw=HOSTILE)
    call: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": HOSTILE, "arguments": HOSTILE}}],
    }
    odd: list[Message] = [
        {"role": HOSTILE, "content": [{"type": HOSTILE, "x": HOSTILE}, 7, {"type": "text", "text": HOSTILE}]}
    ]
    surrogate: Message = {"role": "user", "content": "\ud800 half a character"}
    named = SessionEvidence(SessionSource.HEADER, HOSTILE.replace("\0", ""))
    await page.recorder.turn([*odd, surrogate], call, evidence=named)
    odd_turn = await page.recorder.turn([surrogate], {"role": "assistant", "content": {"not": "a text"}})
    paths = ["/ui", "/ui/sessions", "/ui/sessions?text=%3Cscript%3E"]
    paths += [f"/ui/sessions/{row['id']}" for row in await page.learning.rows("SELECT id FROM sessions")]
    async with page.visitor() as visitor:
        for path in paths:
            shown = await visitor.get(path)
            assert "<script>alert" not in shown, path
            assert "<img src=x" not in shown, path
            assert "60481729" not in shown, path
        assert "half a character" in await visitor.get(f"/ui/sessions/{await session_of(page, odd_turn)}")


async def test_hidden_reasoning_folds(page: Page) -> None:
    reply: Message = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two"}
    turn = await page.recorder.turn([{"role": "user", "content": "2 + 2?"}], reply)
    async with page.visitor() as visitor:
        shown = await visitor.get(f"/ui/sessions/{await session_of(page, turn)}")
    assert '<details class="fold"><summary>Thinking</summary><pre>Two and two</pre></details>' in shown
    assert shown.count("Two and two") == 1


async def test_feedback_from_the_page_is_feedback_of_the_session(page: Page) -> None:
    turn = await judged(page, "s1", -1)
    async with page.visitor() as visitor:
        answer = await visitor.post(f"/ui/turns/{turn}/feedback", rating="up")
        assert FeedbackEffect.AMENDS.told() in html.unescape(answer.text)
        assert "rated 1" in answer.text
        commented = await visitor.post(f"/ui/turns/{turn}/feedback", text="<b>shorter</b>")
        assert "&lt;b&gt;shorter&lt;/b&gt;" in commented.text
        nothing = await visitor.post(f"/ui/turns/{turn}/feedback")
        assert (nothing.status_code, "Give a rating" in nothing.text) == (400, True)
        outcome = await visitor.post(f"/ui/sessions/{await session_of(page, turn)}/outcome", outcome="1")
        assert FeedbackEffect.RECORDED.told(of_session=True) in html.unescape(outcome.text)
    rows = await page.learning.rows("SELECT api_key_id, score, text FROM feedback ORDER BY id")
    assert [(row["api_key_id"], row["score"], row["text"]) for row in rows] == [
        (page.learning.key, 1.0, None),
        (page.learning.key, None, "<b>shorter</b>"),
    ]


async def test_judging_again_without_temporal_says_so(page: Page) -> None:
    turn = await judged(page, "s1", -1)
    async with page.visitor() as visitor:
        answer = await visitor.post(f"/ui/turns/{turn}/judge")
    assert (answer.status_code, "Temporal does not answer" in answer.text) == (503, True)


async def test_an_erased_turn_shows_nothing_that_was_said(page: Page) -> None:
    turn = await judged(page, "s1", -1, HINT)
    session = await session_of(page, turn)
    async with page.visitor() as visitor:
        answer = await visitor.post(f"/ui/turns/{turn}/erase")
        assert "was erased" in answer.text
        shown = await visitor.get(f"/ui/sessions/{session}")
        listed = await visitor.get("/ui/sessions")
    for secret in ("Explain s1", "A long answer", HINT, "It was too long."):
        assert secret not in shown
        assert secret not in listed


async def test_a_version_shows_what_it_learned_from_and_its_gate(page: Page) -> None:
    first = await judged(page, "first", -1, HINT)
    for name in ("second", "third"):
        await judged(page, name, 1)
    await step(page.learning, 1, count=1)
    engine = await page.learning.add_engine("http://127.0.0.1:9")
    await publish(page.learning, 1, engine)
    await reject(page.learning, 2, reason="it moved too far: `gate.parent_distance`")
    async with page.visitor() as visitor:
        shown = html.unescape(await visitor.get("/ui/versions/1"))
        meanings = ("size of the gradient before clipping", "<dt>Head</dt><dd>training goes on from it")
        for words in ("Explain first", "A long answer. (1)", HINT, f"#turn-{first}", "grad norm", *meanings):
            assert words in shown, words
        rejected = html.unescape(await visitor.get("/ui/versions/2"))
        assert "it moved too far: <code>gate.parent_distance</code>" in rejected
        assert "Release it" in rejected
        tree = await visitor.get("/ui/versions")
        assert 'title="it moved too far: gate.parent_distance"' in tree
        assert "<b>rejected</b>: the gate did not accept it" in tree
        assert "Evaluation</th>" not in tree
        assert "<b>pinned</b>" not in tree
        assert "<b>active</b>: answers chats now" in await visitor.get("/ui")
        assert tree.index(">v2<") < tree.index(">v1<") < tree.index(">v0<")
        missing = await visitor.client.get("/ui/versions/77")
        assert (missing.status_code, "has no version 77" in html.unescape(missing.text)) == (404, True)
        released = await visitor.post("/ui/training/release", version="2")
        assert "Version 2 is accepted" in released.text
        # Temporal is away in this test: PostgreSQL holds the change, and the page says what that means.
        assert "workers see the change" in released.text
        back = await visitor.post("/ui/training/roll-back", version="1")
        assert "goes on from version 1" in back.text
        wrong = await visitor.post("/ui/training/roll-back", version="1", recipe="train.batch_samples = 4")
        assert wrong.status_code == 400
        recipe = 'name = "other"\ntrain.batch_samples = 4'
        assert (
            "goes on from version 0" in (await visitor.post("/ui/training/roll-back", version="0", recipe=recipe)).text
        )
        assert (await page.learning.operators.status(POLICY)).needed == 4
        assert "goes on from version 1" in (await visitor.post("/ui/training/roll-back", version="1")).text
        pinned = await visitor.post("/ui/training/pin", version="0")
        assert "Unpin version 0" in pinned.text
        assert "Version 0 of policy 'default' is pinned" in html.unescape(
            (await visitor.post("/ui/training/roll-back", version="1")).text
        )
        assert "Pin" in (await visitor.post("/ui/training/unpin")).text
        assert (await visitor.post("/ui/training/pin", version="x")).status_code == 400
        assert (await visitor.post("/ui/training/dance")).status_code == 404
    status = await page.learning.operators.status(POLICY)
    assert (status.head, status.pinned) == (1, None)


async def test_the_first_page_says_whether_it_gets_better_and_what_was_learned_last(page: Page) -> None:
    async def chats(verdict: Vote, version: int, hint: str | None = None) -> None:
        for number in range(8):
            reply, _ = await page.recorder.chat(f"v{version}-{number}", "Explain it", CHANGED, version=version)
            await page.recorder.judge(reply, verdict, hint)

    async with page.visitor() as visitor:
        await chats(-1, 0, HINT)
        shown = await visitor.get("/ui")
        assert "Not enough verdicts yet" in shown
        assert "0 chats with trained versions have a good or bad verdict, and 8 with version 0" in shown
        assert "Nothing yet. The first step comes once 4 replies are judged." in shown
        await page.learning.set_recipe(RECIPE.model_copy(update={"signal": WITHOUT_JUDGE.signal}))
        without_judge = await visitor.get("/ui")
        assert "Not enough verdicts yet" not in without_judge
        assert "Rate replies by ▲ Good and ▼ Bad to see this" in without_judge
        assert "comes once 4 replies got a reaction." in without_judge
        await page.learning.set_recipe(RECIPE)
        await step(page.learning, 1, count=0)
        await chats(1, 1)
        shown = await visitor.get("/ui")
        assert "Yes: 100%" in shown
        assert "good replies, version 0 had 0%" in shown
        assert "+100 points, 95 % interval +54 to +100" in shown
        assert HINT in shown
        assert 'From 4 replies, in <a href="/ui/versions/1' in shown
        assert '8 / 0 <span class="soft">100%' in shown
        assert '0 / 8 <span class="soft">0%' in shown


async def test_a_lesson_is_what_was_learned_last_until_a_newer_version_learned_words(page: Page) -> None:
    lessons = page.services[0].lesson_operations
    await page.recorder.chat("first", "Explain the tides")
    await lessons.add(POLICY, "Answer briefly.")
    async with page.visitor() as visitor:
        assert "Answer briefly." not in await visitor.get("/ui/now")  # no prompt holds it
        await page.learning.set_recipe(RECIPE.model_copy(update={"lessons": Lessons(enabled=True)}))
        assert "Answer briefly." in await visitor.get("/ui/now")
        await step(page.learning, 1)
        without_words = await visitor.get("/ui/now")
        assert ("Answer briefly." in without_words, "Verdicts alone" in without_words) == (True, False)
        await judged(page, "hinted", -1, HINT)
        await step(page.learning, 2, count=3)
        with_words = await visitor.get("/ui/now")
        assert ("Answer briefly." in with_words, HINT in with_words) == (False, True)
        await lessons.add(POLICY, "Answer in English.")
        newer = await visitor.get("/ui/now")
        assert ("Answer in English." in newer, HINT in newer) == (True, False)


# Markdown of a reply, which nobody checked before the page shows it.
ODD = {
    "a table": ("| what | <b>how</b> |\n|:--|--:|\n| tides | 12 h |", "<td>tides</td>"),
    "code without its end": ("Look:\n```python x <i>\n<script>alert(1)</script>", "<pre><code>&lt;script&gt;alert(1)"),
    "a heading": ("# Tides & moons", '<p class="heading">Tides &amp; moons (1)</p>'),
    "links": ("*see* [this](javascript:alert(1)) ![i](/ui/logout)", "<em>see</em> [this](javascript:alert(1)) ![i]"),
    "html": ("**so** <img src=x onerror=alert(2)>", "<strong>so</strong> &lt;img src=x onerror=alert(2)&gt;"),
    "depth": ("> " * 400 + "deep", "<blockquote>"),
    "plain": ("2 * 3 * 4 < 25", '<div class="said" dir="auto">2 * 3 * 4 &lt; 25'),
}


async def test_a_version_shows_each_reply_with_its_structure_and_what_followed_it(page: Page) -> None:
    for name, (written, _) in ODD.items():
        first, second = await page.recorder.chat(name, f"Explain {name}", f"{name}? {CHANGED}", reply=written)
        await page.recorder.judge(first, -1, after=second)
    [rated] = await page.recorder.chat("rated", "Explain it")
    await page.recorder.judge(rated, 1)
    await page.services[0].feedback.give(page.learning.key, rated, 1.0, "<b>Perfect</b>")
    await page.learning.set_recipe(recipe(batch_samples=8))
    await step(page.learning, 1, count=0)
    async with page.visitor() as visitor:
        shown = await visitor.get("/ui/versions/1")
        for name, (_, expected) in ODD.items():
            assert expected in shown, name
            assert f"{name}? {CHANGED}" in shown, name
        for markup in ("<script>alert", "<img src=x", "<i>", 'href="javascript', "style="):
            assert markup not in shown, markup
        assert "&lt;b&gt;Perfect&lt;/b&gt;" in shown
        assert "rated 1" in shown
        # As it was written is kept beside what has structure, and only there.
        assert shown.count("<summary>As written</summary>") == len(ODD) - 1
        assert "[this](javascript:alert(1))" in shown.split("<summary>As written</summary>", 1)[1]
        # The base model and a version that does not exist.
        assert "nothing was trained" in await visitor.get("/ui/versions/0")


async def test_any_two_versions_are_compared(page: Page) -> None:
    for number in (1, 2):
        await step(page.learning, number)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    for number in (1, 2):
        await publish(page.learning, number, engine["id"])
    async with page.visitor() as visitor:
        assert "<option selected>1</option>" in await visitor.get("/ui/versions/2")
        shown = (await visitor.post("/ui/compare", version="2", other="0", prompt="Hello")).text
        assert shown.index(">version 0<") < shown.index(">version 2<")
        assert "its parent" not in shown
        assert ">version 1<" in (await visitor.post("/ui/compare", version="0", other="1", prompt="Hello")).text
        for other, status in (("2", 400), ("7", 404), ("x", 400)):
            refused = await visitor.post("/ui/compare", version="2", other=other, prompt="Hello")
            assert refused.status_code == status, other


async def test_what_is_live_while_no_engine_answers_is_said(page: Page) -> None:
    async with page.visitor() as visitor, visitor.client.stream("GET", "/ui/events") as events:
        lines = events.aiter_lines()
        async with asyncio.timeout(60):
            assert await _next_event(lines) == "changed"
            assert await anext(lines) == "data: "
            page.engine.healthy = False
            while await anext(lines) != "data: nothing answers":
                pass
        page.draining.append(True)


async def test_what_answers_after_a_pin_is_told_also_while_a_canary_is_open(page: Page) -> None:
    await page.learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await step(page.learning, 1)
    async with page.visitor() as visitor:
        await visitor.post("/ui/training/pin", version="0")
        told = (await visitor.post("/ui/training/unpin")).text
        assert "Version 1 is tried by a share of the conversations again, and version 0 answers the others" in told
        assert "newest version answers" not in told


async def test_pausing_shows_the_reason_until_it_is_resumed(page: Page) -> None:
    await page.recorder.chat("s1", "Hello")
    async with page.visitor() as visitor:
        assert "I am on holiday" in (await visitor.post("/ui/training/pause", reason="I am on holiday")).text
        again = await visitor.get("/ui/now")
        assert again.count("aused: I am on holiday") == 2  # also beside the buttons
        assert "I am on holiday" in await visitor.get("/ui/engines")
        await visitor.post("/ui/training/resume")
        shown = await visitor.get("/ui/now")
        assert "paused: I am on holiday" not in shown
        assert "<b>training resumed</b>" in shown


async def test_the_first_visit_leads_to_a_key_and_a_recorded_chat(page: Page) -> None:
    async with page.visitor() as visitor:
        led = await visitor.client.get("/ui")
        assert led.headers["location"] == "/ui/start"
        made = html.unescape((await visitor.post("/ui/keys", name="mine")).text)
        secret = made.split("Bearer ")[1].split('"')[0]
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
        async with httpx.AsyncClient(base_url=page.url, headers={"Authorization": f"Bearer {secret}"}) as client:
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await visitor.client.get("/ui")).status_code == 200

        headers = {"X-CSRF-Token": visitor.csrf, "X-Session-ID": "page-12345678"}
        assert (await visitor.client.post("/ui/chat", json=body)).status_code == 403
        chatted = await visitor.client.post("/ui/chat", json=body, headers=headers)
        assert chatted.json()["choices"][0]["message"]["content"].startswith("Hello")
        recorded = await visitor.get("/ui/chat/page-12345678")
        assert "Reply 1" in recorded
        assert 'waits for a reaction, or for its judge">waiting</span></p><p class="why">waits for' in recorded
        newest, _ = await page.learning.rows("SELECT id, session_id FROM turns ORDER BY id DESC")
        await page.learning.judgements.open(newest["id"], None, b"evidence", HINTS)
        for path in ("/ui/chat/page-12345678", f"/ui/sessions/{newest['session_id']}"):
            judging = await visitor.get(path)
            assert ("being judged" in judging, 'class="why"' in judging) == (True, False), path
        assert (await visitor.client.get("/ui/chat/other")).status_code == 404


async def test_events_say_when_to_look_again_and_end_when_the_gateway_drains(page: Page) -> None:
    async with page.visitor() as visitor, visitor.client.stream("GET", "/ui/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.aiter_lines()
        async with asyncio.timeout(60):
            assert await _next_event(lines) == "changed"
            await page.recorder.chat("s1", "Hello")
            assert await _next_event(lines) == "changed"
            page.draining.append(True)
            assert await _next_event(lines) is None


async def test_workflows_are_links_into_temporals_ui_where_that_is_known(page: Page) -> None:
    turn = await judged(page, "s1", 1)
    session = await session_of(page, turn)
    [engine] = [row["id"] for row in await page.learning.rows("SELECT id FROM engines")]
    paths = {f"/ui/sessions/{session}": f"session/{session}", "/ui": f"training/{POLICY}"}
    paths |= {"/ui/now": f"training/{POLICY}", "/ui/engines": f"engine/{engine}"}
    async with page.visitor() as visitor:
        for path, workflow in paths.items():
            shown = await visitor.get(path)
            assert f">{workflow}</code>" in shown, path
            assert "/namespaces/" not in shown, path
        page.services[0].links = WorkflowLinks("http://127.0.0.1:8233")
        for path, workflow in paths.items():
            link = html.escape(str(WorkflowLinks("http://127.0.0.1:8233").of(workflow)))
            assert f'<a href="{link}" rel="noreferrer"' in await visitor.get(path), path


async def test_the_page_shows_what_a_step_does_and_looks_again_when_that_changes(page: Page) -> None:
    await page.learning.add_samples(4)
    steps = page.learning.steps
    assert (await steps.claim(POLICY, 1)).state is StepState.CLAIMED
    await steps.begin_attempt(POLICY, 1)
    async with page.visitor() as visitor, visitor.client.stream("GET", "/ui/events") as events:
        lines = events.aiter_lines()
        async with asyncio.timeout(60):
            assert await _next_event(lines) == "changed"
            await steps.note_progress(POLICY, 1, 1, "training, micro-batch 3 of 8", Pace(5120.0, 130.0))
            assert await _next_event(lines) == "changed"
        shown = await visitor.get("/ui/now")
        assert "training, micro-batch 3 of 8, for " in shown
        assert ", 5,120 tokens/s, about 2 min 10 s left</p>" in shown
        page.draining.append(True)


async def _next_event(lines: AsyncIterator[str]) -> str | None:
    async for line in lines:
        if line.startswith("event: "):
            return line.removeprefix("event: ")
    return None


async def test_nobody_rates_what_an_environment_rates(page: Page) -> None:
    _, [episode, _] = await run_group(page.learning, [1.0, 0.0])
    [row] = await page.learning.rows("SELECT id, session_id FROM turns WHERE episode_id = %s", episode.id)
    turn, session = row["id"], row["session_id"]
    async with page.visitor() as visitor:
        shown = await visitor.get(f"/ui/sessions/{session}")
        for button in ("rate turn", "Judge again", "Task succeeded"):
            assert button not in shown, button
        assert "Erase" in shown
        for path, fields in (
            (f"/ui/turns/{turn}/feedback", {"rating": "up"}),
            (f"/ui/sessions/{session}/outcome", {"outcome": "1"}),
        ):
            refused = await visitor.post(path, **fields)
            assert (refused.status_code, "cannot be rated" in refused.text) == (409, True), path
    feedback = page.services[0].feedback
    key = ApiKeyId(episode.id)
    assert await feedback.give(key, turn, 1.0, None) is None
    assert await feedback.give_outcome(key, POLICY, str(session), 1) is None
    assert await page.learning.rows("SELECT id FROM feedback") == []
    [kept] = await page.learning.rows("SELECT task_outcome FROM sessions WHERE id = %s", session)
    assert kept["task_outcome"] is None


async def test_a_number_out_of_range_is_refused(page: Page) -> None:
    [turn] = await page.recorder.chat("s1", "Hello")
    session = await session_of(page, turn)
    async with page.visitor() as visitor:
        for path in (
            f"/ui/sessions/{session}?page=1000000000000000000000",
            f"/ui/sessions/{session}?page=0",
            f"/ui/sessions?version={'9' * 5000}",
            f"/ui/versions/{'9' * 5000}",
        ):
            assert (await visitor.client.get(path)).status_code == 400, path
        assert (await visitor.client.get(f"/ui/sessions/{session}?page={2**31 - 1}")).status_code == 200
        for action in ("roll-back", "pin", "release"):
            assert (await visitor.post(f"/ui/training/{action}", version="9" * 5000)).status_code == 400


async def test_an_address_that_is_none_is_said_on_a_page_with_the_menu(page: Page) -> None:
    async with page.visitor() as visitor:
        for path in ("/ui/nothing", "/ui/versions/77", "/ui/sessions/nobody"):
            missing = await visitor.client.get(path)
            assert (missing.status_code, 'aria-label="Pages"' in missing.text) == (404, True), path
            assert "Not found" in missing.text
    async with httpx.AsyncClient(base_url=page.url) as stranger:
        assert (await stranger.get("/ui/nothing")).headers["location"] == "/ui/login"


async def test_the_limits_of_a_key_hold_on_the_page_too(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.services[0].key_limits, "_clock", lambda: 1000.0)  # nothing is refilled
    prefix = page.admin_key[: len("cl-00000000")]
    await page.services[0].key_operations.set_limits(prefix, KeyLimits(requests_per_minute=2))
    said = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    async with page.visitor() as visitor:
        headers = {"X-CSRF-Token": visitor.csrf}
        answers = [await visitor.client.post("/ui/chat", json=said, headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        await judged(page, "first", -1, HINT)
        await step(page.learning, 1, count=3)
        [engine] = await page.learning.rows("SELECT id FROM engines")
        await publish(page.learning, 1, engine["id"])
        compared = await visitor.post("/ui/compare", prompt="Hello", version="1")
        assert "2 requests a minute" in html.unescape(compared.text)


# What commands list fits the terminal: six columns at most, and what names a row is whole.

MOST_COLUMNS = 6


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.long)])
async def test_lists_fit_and_name_their_rows(page: Page, columns: int) -> None:
    first, _ = await page.recorder.chat("first", "Explain " + "the tides and all that moves them " * 5, CHANGED)
    await page.recorder.judge(first, -1, HINT)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    await reject(page.learning, 2, reason="it moved too far, and further than anything that was ever seen before")
    result, [good, _] = await run_group(page.learning, [1.0, 0.0], turns=2)
    [key] = await page.learning.rows("SELECT prefix FROM api_keys WHERE name = 'admin'")
    named = {
        ("session", "list", "--all"): "[0-9a-f]{8}",
        ("policy", "list"): "default",
        ("policy", "versions"): "2",
        ("policy", "events"): "",
        ("engine", "list"): re.escape(engine["id"]),
        ("key", "list"): key["prefix"],
        ("rollouts", "groups"): str(result.id)[:8],
        ("episode", "list"): str(good.id)[:8],
    }
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": str(columns)}
    for made in ("soon", "gone"):
        await asyncio.to_thread(clawloop, "key", "create", "--name", made, "--days", "30", **settings)
    await asyncio.to_thread(clawloop, "key", "revoke", "gone", **settings)
    for verb, name in named.items():
        lines = (await asyncio.to_thread(clawloop, *verb, **settings)).stdout.splitlines()
        assert max(map(len, lines)) <= columns, verb
        # Two blanks stand between columns, and one within the names of some.
        assert 1 < len(re.split(r" {2,}", lines[0])) <= MOST_COLUMNS, verb
        assert any(re.match(name, line) for line in lines[1:]), verb
    keys = (await asyncio.to_thread(clawloop, "key", "list", **settings)).stdout
    assert re.search(r"  \d{4}-\d\d-\d\d +soon$", keys, re.MULTILINE)
    assert re.search(r"  revoked \d+ \w+ ago +gone$", keys, re.MULTILINE)


# A session with pictures on the page.

SCRIPT = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"


async def test_a_picture_is_shown_and_what_is_none_is_a_download(page: Page) -> None:
    asked: Message = asks_about(png())
    asked["content"].append(image_part(SCRIPT, "image/svg+xml"))  # type: ignore[union-attr]
    record = turn_record(messages=[asked], api_key_id=page.learning.key)
    session = (await page.learning.turns.insert(record)).session_id
    picture, script = (f"/ui/files/{sha256(content).hexdigest()}" for content in (png(), SCRIPT))
    async with page.visitor(page.read_key) as visitor:
        shown = await visitor.get(f"/ui/sessions/{session}")
        assert f'<img src="{picture}" alt="image/png, 30 bytes, 640x480, sha256 ' in shown
        assert f'<a href="{script}" hx-boost="false" download>' in shown
        assert f'<img src="{script}"' not in shown
        assert "base64" not in shown
        answer = await visitor.client.get(picture)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, png(), "image/png")
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
        answer = await visitor.client.get(script)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await visitor.client.get("/ui/files/abc")).status_code == 400
    async with httpx.AsyncClient(base_url=page.url) as stranger:
        assert (await stranger.get(picture)).status_code != 200


# A trained reply's tokens, by the advantage that its step gave each.


async def test_a_trained_reply_shows_its_tokens_by_their_advantage(page: Page) -> None:
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1, HINT)
    await page.learning.set_recipe(recipe(batch_samples=1))
    steps = page.learning.steps
    assert (await steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await steps.batch(POLICY, 1)
    [sample] = batch.samples
    count = len(sample.response_ids)
    advantages = {sample.sample_id: [0.5, -2.0, None, *[0.0] * count][:count]}
    moves = {sample.sample_id: [0.25, -0.125, None, *[0.0] * count][:count]}
    async with page.visitor() as visitor:
        path = f"/ui/turns/{turn}/tokens"
        assert (await visitor.client.get(path)).status_code == 404
        assert (
            await commit(page.learning, batch, trained(batch, advantages=advantages, moves=moves))
            is StepState.COMMITTED
        )
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
        assert f'hx-get="{path}"' in await visitor.get(f"/ui/sessions/{row['session_id']}")
        shown = html.unescape(await visitor.get(path))
        first, second = sample.response_ids[:2]
        assert f'<span class="token up-1" title="advantage +0.500, moved +0.250"><{first}></span>' in shown
        assert f'<span class="token down-3" title="advantage -2.000, moved -0.125"><{second}></span>' in shown
        assert "<td>-2.000</td><td>-0.125</td>" in shown
        assert "which the gate needs anyway, took 0.5 s of the step" in shown
        stored = (await page.services[0].reading.detail(str(turn), tokens=True)).tokens
        assert stored is not None
        assert (stored.step, stored.moves_seconds, list(stored.moves or ())) == (1, 0.5, moves[sample.sample_id])
        assert shown.count('<span class="token') == count + 2  # the legend has two
        page.engine.healthy = False
        while page.services[0].engines.healthy():
            await asyncio.sleep(0.05)
        assert "No engine gave the texts" in await visitor.get(path)
        await visitor.post(f"/ui/turns/{turn}/erase")
        assert (await visitor.client.get(path)).status_code == 404
    assert await page.learning.rows("SELECT FROM step_samples WHERE advantages IS NOT NULL OR moves IS NOT NULL") == []


# What a policy practises, on the page and by commands: groups, episodes, and each episode as a conversation.


async def test_rollouts_are_started_and_paused(page: Page) -> None:
    plan = {"environment": "terminal", "size": "4", "groups": "1", "barren": "9"}
    async with page.visitor() as visitor:
        shown = await visitor.get("/ui/rollouts")
        assert "Never started" in shown
        assert 'value="tool-call" checked><span>tool-call <span class="soft">“What is 58 plus 97?”' in shown
        own = await visitor.post("/ui/rollouts/start", **plan, own="my tasks")
        assert 'name="own" maxlength="200" value="my tasks"' in own.text
        assert "Started." in (await visitor.post("/ui/rollouts/start", **plan)).text
        assert (await visitor.post("/ui/rollouts/start", **plan | {"size": "1"})).status_code == 400
        assert "too dear" in (await visitor.post("/ui/rollouts/pause", reason="too dear")).text
    status = await page.services[0].rollout_operations.status(POLICY)
    assert status.plan is not None
    assert (status.state.value, status.plan.size, status.plan.barren_limit) == ("paused", 4, 9)


async def test_an_environment_without_a_worker_is_said_on_the_page(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(self: NoTemporal, asked: object) -> bool:
        return False

    async with page.visitor() as visitor:
        await visitor.post("/ui/rollouts/start", environment="terminal", size="4", groups="1", barren="9")
        missing = "no worker serves the environment &#39;terminal&#39;"
        assert missing not in await visitor.get("/ui/rollouts")  # without Temporal nobody can say
        for question in ("asks_for_work", "has_work"):
            monkeypatch.setattr(NoTemporal, question, no)
        assert missing in await visitor.get("/ui/rollouts")


async def test_a_curriculum_is_shown_by_kind_and_is_off_unless_chosen(page: Page) -> None:
    plan = {"environment": "tool-call", "size": "4", "groups": "1", "barren": "9"}
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "100"}
    async with page.visitor() as visitor:
        assert "Table of kinds of tasks" not in (await visitor.post("/ui/rollouts/start", **plan)).text
        shown = (await visitor.post("/ui/rollouts/start", **plan, curriculum="on")).text
        assert re.search(r'<th scope="row">times</th><td>2 of 6</td>', shown)
        refused = await visitor.post("/ui/rollouts/start", **plan | {"environment": "tasks"}, curriculum="on")
        assert (refused.status_code, "kinds of tasks" in refused.text) == (400, True)
    by_command = (await asyncio.to_thread(clawloop, "rollouts", "status", **settings)).stdout
    assert re.search(r"^curriculum +3 kinds of tasks$", by_command, re.MULTILINE)
    assert re.search(r"^times +2 of 6 +1 +0 of 32", by_command, re.MULTILINE)


async def test_a_reason_that_is_too_long_or_missing_is_refused_and_never_cut(page: Page) -> None:
    plan = {"environment": "terminal", "size": "4", "groups": "1", "barren": "9"}
    async with page.visitor() as visitor:
        await visitor.post("/ui/rollouts/start", **plan)
        for place in ("rollouts", "training"):
            for reason in ("x" * 501, "  "):
                refused = await visitor.post(f"/ui/{place}/pause", reason=reason)
                assert (refused.status_code, "1 to 500 characters" in refused.text) == (400, True), place
            assert "x" * 500 in (await visitor.post(f"/ui/{place}/pause", reason="x" * 500)).text
    refused_by_command = await asyncio.to_thread(
        clawloop, "training", "pause", "x" * 501, DATABASE_URL=page.database_url
    )
    assert refused_by_command.returncode == 2


async def test_groups_and_episodes_are_listed(page: Page) -> None:
    result, [good, lost] = await run_group(page.learning, [1.0, None], turns=2)
    other, _ = await run_group(page.learning, [0.5, 0.25])
    async with page.visitor() as visitor:
        listed = await visitor.get("/ui/rollouts")
        assert listed.count("?policy=default&amp;group=") == 2
        assert listed.count('href="/ui/episodes/') == 4
        assert "the verifier hung" in listed
        of_one = await visitor.get(f"/ui/rollouts?group={result.id}")
        assert of_one.count('href="/ui/episodes/') == 2
        assert f"/ui/rollouts?group={result.id}" in of_one  # it loads the same anew
        missing = await visitor.client.get(f"/ui/rollouts?group={uuid4()}")
        assert (missing.status_code, "there is no group" in html.unescape(missing.text)) == (404, True)
        shown = await visitor.get(f"/ui/episodes/{good.id}")
        for words in ("reward 1", "completed", "Step 1", f"rollout-group/{result.id}"):
            assert words in shown, words
        assert shown.count("<article") == 1  # of its two sessions the first
        assert shown.count('href="/ui/sessions/') >= 2
        assert "rate turn" not in shown
        assert "no reward" in await visitor.get(f"/ui/episodes/{lost.id!s}")
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE episode_id = %s LIMIT 1", good.id)
        assert f'href="/ui/episodes/{good.id}"' in await visitor.get(f"/ui/sessions/{row['session_id']}")
        assert (await visitor.client.get(f"/ui/episodes/{uuid4()}")).status_code == 404
    assert other.mean_reward == 0.375


def cut(shown: str, first: str, last: str) -> str:
    """The words of a page from one of its marks to another."""
    _, found, rest = shown.partition(first)
    part, ended, _ = rest.partition(last)
    assert (found, ended) == (first, last)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)).split())


async def test_an_episode_shows_each_step_with_its_reward_and_the_files_it_changed(page: Page, tmp_path: Path) -> None:
    artifacts = page.services[0].artifacts
    assert isinstance(artifacts, ArtifactFolder)
    episode = await played_repair(page.learning, artifacts)
    path = f"/ui/episodes/{episode.id}"
    async with page.visitor() as visitor:
        shown = await visitor.get(path)
        first, second, third = shown.split("<article")[1:]
        task, _, _ = shown.partition("<article")
        assert "Something in" in task
        # The command as it was run, what it printed, a picture that is seen at once, and the reward beside them.
        assert "Calls shell cat " in cut(first, ">", "came back")
        assert re.search(r'<pre class="result">.*\bdef ', first, re.DOTALL)
        assert '<details class="fold file" open>' in first
        assert cut(first, '<p class="role">reward</p>', "</p>") == "1"
        assert '<span class="remove">-return a - b\n</span>' in second
        assert "It is repaired." in third
        assert "came back" not in third
        changed = cut(shown, 'aria-labelledby="changes-title">', "</section>")
        assert re.search(r"\.py changed @@ .* \+# repaired notes\.txt new @@ -0,0 \+1 @@ \+done$", changed), changed
        settings = {"DATABASE_URL": page.database_url, "CLAWLOOP_DATA": str(tmp_path)}
        printed = (await asyncio.to_thread(clawloop, "episode", "show", str(episode.id), **settings)).stdout
        _, _, files = printed.partition("Files that the agent changed\n")
        assert re.match(r"\w+\.py: changed\n@@ .*\n\+# repaired\nnotes\.txt: new\n", files, re.DOTALL), printed
        [row] = await page.learning.rows("SELECT encode(artifact_sha256, 'hex') AS digest FROM episodes LIMIT 1")
        await artifacts.delete(row["digest"])
        assert "is not here any more" in await visitor.get(path)
        assert "no messages" in await visitor.get(f"{path}?page=2")


@pytest.mark.parametrize(
    ("found", "left", "expected"),
    [
        ({"a": b"1\n"}, {"./a": b"1\n"}, []),
        ({}, {"a": b"1\n"}, [("a", Change.NEW, ["@@ -0,0 +1 @@", "+1"])]),
        ({"a": b"1\n"}, {}, [("a", Change.GONE, ["@@ -1 +0,0 @@", "-1"])]),
        ({"a": b"1\n2"}, {"a": b"1\n3"}, [("a", Change.CHANGED, ["@@ -1,2 +1,2 @@", " 1", "-2", "+3"])]),
        ({}, {"a": b"\xff", "b": b"x" * (TEXT_CHARACTERS + 1), "c": b"a\0b"}, [(n, Change.NEW, None) for n in "abc"]),
        (None, {"a": b""}, [("a", Change.NEW, [])]),
    ],
)
def test_changed_files_are_those_that_differ(
    found: dict[str, bytes] | None, left: dict[str, bytes], expected: list[object]
) -> None:
    changes = changes_of(None if found is None else packed(found), packed(left))
    assert [(file.path, file.change, file.lines) for file in changes.files] == expected
    assert (changes.more, changes.compared) == (0, found is not None)


def test_of_many_changed_files_the_first_are_shown() -> None:
    changes = changes_of(None, packed({f"{n:03}": b"x" for n in range(MOST_FILES + 3)}))
    assert (len(changes.files), changes.more) == (MOST_FILES, 3)


async def test_commands_list_groups_and_show_an_episode_as_a_conversation(page: Page) -> None:
    result, [good, _] = await run_group(page.learning, [1.0, 0.0], turns=2)
    for columns in (80, 120):
        settings = {"DATABASE_URL": page.database_url, "COLUMNS": str(columns)}
        groups = (await asyncio.to_thread(clawloop, "rollouts", "groups", **settings)).stdout
        assert str(result.id)[:8] in groups
        assert "2 of 2" in groups
        shown = (await asyncio.to_thread(clawloop, "episode", "show", str(good.id), **settings)).stdout
        assert re.search(r"^reward +1$", shown, re.MULTILINE)
        assert shown.count("Session ") == 2
        assert "assistant: " in shown
        for line in (groups + shown).splitlines():
            assert len(line) <= columns or str(result.id) in line or str(good.id) in line, line


# A version beside its parent, what happened to a policy, and the chart: on the page, by commands and over REST.


async def taught(page: Page) -> None:
    """A reply that the next step learns from."""
    first, _ = await page.recorder.chat("first", "Explain first", CHANGED)
    await page.recorder.judge(first, -1, HINT)


async def test_a_version_and_its_parent_answer_the_same_prompt_as_side_turns(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.chat.comparison.LOAD_SECONDS", 0.1)
    await taught(page)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    async with page.visitor() as visitor:
        missing = await visitor.post("/ui/compare", version="1", prompt="Hello")
        assert "No engine has loaded it within 0.1 s" in missing.text
        # The engine's agent, which does not run here, was asked to.
        assert [ref.n for ref in await page.learning.publishing.wanted(engine["id"])] == [1]
        await publish(page.learning, 1, engine["id"])
        shown = (await visitor.post("/ui/compare", version="1", prompt="Hello")).text
        assert shown.count("Hello there, friend.") == 2
        assert shown.index("version 0, its parent") < shown.index(">version 1<")
        assert "Both answered the same, word for word." in shown
        assert "Both answered the same" not in missing.text
        assert (await visitor.post("/ui/compare", version="0", prompt="Hello")).status_code == 404
        assert (await visitor.post("/ui/compare", version="1", prompt=" ")).status_code == 400
    asked = [request["model"] for request in page.engine.requests]
    assert sorted(asked) == ["default-v1", "tiny", "tiny"]
    async with asyncio.timeout(60):
        while len(sides := await page.learning.rows("SELECT version FROM turns WHERE kind = 'side'")) < 3:
            await asyncio.sleep(0.05)
    assert sorted(row["version"] for row in sides) == [0, 0, 1]


async def test_a_version_is_compared_with_its_parent_over_rest_and_by_a_command(page: Page) -> None:
    await taught(page)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    path = "/admin/v1/policies/default/versions/{}/compare"
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        found = (await client.post(path.format(1))).json()
        assert (found["version"], found["parent"]) == (1, 0)
        # Without prompts: what was asked in the replies it was trained on.
        assert "Explain first" in [compared["prompt"] for compared in found["prompts"]]
        assert [answer["version"] for answer in found["prompts"][0]["answers"]] == [0, 1]
        given = (await client.post(path.format(1), json={"prompts": ["One?", "Two?"]})).json()
        assert [compared["prompt"] for compared in given["prompts"]] == ["One?", "Two?"]
        for number, body, status in (
            (0, {}, 404),
            (7, {}, 404),
            (1, {"prompts": []}, 400),
            (1, {"prompts": [" "]}, 400),
        ):
            assert (await client.post(path.format(number), json=body)).status_code == status, (number, body)
        await page.services[0].training_operations.create_policy("anna", "default", None)
        foreign = await client.post("/admin/v1/policies/anna/versions/1/compare")
        assert (foreign.status_code, foreign.json()["code"]) == (409, "other_policy")
    asked = ("policy", "compare", "1", "--prompt", "Hello", "--url", page.url, "--key", page.admin_key)
    for columns in (80, 120):
        printed = (await asyncio.to_thread(clawloop, *asked, COLUMNS=str(columns))).stdout
        assert printed.count("Hello there, friend.") == 2
        assert printed.index("-- version 0, its parent") < printed.index("-- version 1\n")
        assert printed.splitlines()[-1] == "-- both answered the same, word for word"
        assert max(map(len, printed.splitlines())) <= columns


async def test_what_happened_to_a_policy_is_told_everywhere(page: Page) -> None:
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        await client.post("/admin/v1/training/pause", json={"reason": "a holiday"})
        [event] = (await client.get("/admin/v1/policies/default/events")).json()["events"]
        assert (event["kind"], event["detail"]["reason"]) == ("paused", "a holiday")
        assert (await client.get("/admin/v1/policies/nobody/events")).status_code == 404
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "80"}
    assert "reason a holiday" in (await asyncio.to_thread(clawloop, "policy", "events", **settings)).stdout
    async with page.visitor() as visitor:
        assert "a holiday" in await visitor.get("/ui/now")


async def test_the_chart_has_a_mean_and_a_mark_for_each_version(page: Page) -> None:
    await page.recorder.chat("s1", "one", "two", version=0)
    turns = await page.recorder.chat("s2", "three", "four", version=1)
    await page.recorder.judge(turns[0], 1)
    async with page.visitor() as visitor:
        chart = (await visitor.client.get("/ui/chart")).json()
    assert chart["good"] == [None, None, 1.0, 1.0]
    assert chart["length"] == [2.0] * 4
    assert chart["versions"] == [[0, 0], [2, 1]]
    assert chart["probes"] == chart["match"] == [None] * 4


def test_the_chart_has_the_match_of_probes_of_each_version() -> None:
    def version(n: int, parent: int | None, **figures: float | None) -> VersionView:
        gate = [GateCheck("probes", CheckResult.PASSED, "", figures)] if figures else []
        return VersionView(
            n=n,
            parent=parent,
            state="",
            active=False,
            pinned=False,
            engines=(),
            metrics=None,
            created_at=datetime.now(UTC),
            gate=gate,
        )

    measured = [version(0, None), version(1, 0, right=0.5, parent_right=0.25), version(2, 1, right=None)]
    assert probes_of(measured) == {0: 0.25, 1: 0.5}


async def test_what_an_evaluation_measured_is_told_everywhere(page: Page) -> None:
    await taught(page)
    await step(page.learning, 1, count=3)
    await page.recorder.chat("later", "Explain second", version=1)
    found = PostgresMeasurements(page.learning.database)
    for version, match in ((0, 0.25), (1, 0.5), (1, 0.75)):  # the newest of several counts
        await found.record(POLICY, version, match, 60)
    async with page.visitor() as visitor:
        chart = (await visitor.client.get("/ui/chart")).json()
        assert chart["match"] == [{0: 0.25, 1: 0.75}[reply] for reply in (0,) * (len(chart["match"]) - 1) + (1,)]
        assert chart["probes"] == [None] * len(chart["match"])
        for path in ("/ui/now", "/ui/versions"):
            assert re.findall(r'<td class="number">(\d+%)</td><td>', await visitor.get(path)) == ["75%", "25%"], path
        assert "version measured" not in await visitor.get("/ui/now")
        assert "In an evaluation it answered 75% of" in await visitor.get("/ui/versions/1")
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        versions = (await client.get("/admin/v1/policies/default/versions")).json()["versions"]
        assert [version["match"] for version in versions] == [0.25, 0.75]
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "200"}
    for command in (("policy", "versions"), ("policy", "version", "1")):
        assert "match 75%" in (await asyncio.to_thread(clawloop, *command, **settings)).stdout, command
    assert "match 0.75, of 60" in (await asyncio.to_thread(clawloop, "policy", "events", **settings)).stdout


# What keeps a policy from learning is told by the command, over REST and on the page alike.


async def told(page: Page, command: list[str], rest: str, shown: str) -> dict[str, str]:
    """What the three say, without line breaks.

    Args:
        command: of the command line; rest: a path of the admin API; shown: one of the page.
    """
    printed = await asyncio.to_thread(clawloop, *command, DATABASE_URL=page.database_url, COLUMNS="1000")
    assert printed.returncode == 0, printed.stderr
    async with httpx.AsyncClient(
        base_url=page.url, headers={"Authorization": f"Bearer {page.admin_key}"}, timeout=60
    ) as client:
        answered = (await client.get(f"/admin/v1/{rest}")).text
    async with page.visitor() as visitor:
        seen = html.unescape(re.sub("</?code>", "`", await visitor.get(shown)))
    texts = {"command": printed.stdout, "REST": answered, "page": seen}
    return {where: " ".join(text.split()) for where, text in texts.items()}


async def status(page: Page) -> dict[str, str]:
    return await told(page, ["training", "status"], "training", "/ui/now")


async def test_a_canary_with_no_traffic_is_told(page: Page) -> None:
    await page.learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await step(page.learning, 1)
    lacking = "no traffic: 0 judged sessions of the canary and 0 of the version before, 8 of each are needed"
    for where, text in (await status(page)).items():
        assert f"version 1 is a canary, and its verdicts have not decided yet: {lacking}" in text, where


async def test_a_held_out_share_that_leaves_no_batch_is_told(page: Page) -> None:
    learning = page.learning
    await step(learning, 1)
    await learning.add_samples(4)
    await learning.execute("UPDATE samples SET state = 'held_out' WHERE state = 'fresh'")
    said = "for the next step; 4 since the last step are held out with their sessions: lower gate.held_out"
    for where, text in (await status(page)).items():
        count = "0 of 4 replies" if where == "page" else "0 of 4 samples"
        assert f"{count} {said}" in text, where


async def test_a_gate_that_no_version_can_pass_is_told(page: Page) -> None:
    for n in (1, 2, 3):
        await reject(
            page.learning, n, reason="numbers: distance to the parent 0.02, limit 1e-06 (gate.parent_distance)"
        )
    said = (
        "paused: 3 steps in a row without an accepted version, the last one step 3: rejected: numbers: distance to the "
        "parent 0.02, limit 1e-06 (gate.parent_distance); see `clawloop policy versions`"
    )
    for where, text in (await status(page)).items():
        assert said in text, where


async def test_how_long_a_gate_took_is_told(page: Page) -> None:
    learning = page.learning
    await learning.add_samples(4)
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, 1)
    numbers = GateCheck("numbers", CheckResult.PASSED, "within limits", {}).timed(0.25)
    replay = GateCheck("replay", CheckResult.PASSED, "no change", {}).timed(1.5)
    await learning.steps.commit(batch, trained(batch), [numbers, replay])
    made = await told(page, ["policy", "versions"], f"policies/{POLICY}/versions", "/ui/versions/1")
    command, rest, shown = made.values()
    assert "replay passed: no change; its gate took 1.75 s" in command
    assert '"gate_seconds":1.75' in rest.replace(": ", ":")
    assert '"seconds":1.5' in rest.replace(": ", ":")
    assert "Its checks took 1.75 s." in shown
    assert "<dt>seconds</dt><dd>0.25 s" in shown


# A policy that does not exist is an error that names it, wherever one is asked for: not an empty list.


def paths(prefix: str) -> list[str]:
    """What is read of one policy, with a policy that does not exist."""
    application = create_app(lambda: pytest.fail("no service is needed to list routes"))
    found: list[str] = []
    for route in application.routes:
        if not isinstance(route, APIRoute) or "GET" not in route.methods or not route.path.startswith(prefix):
            continue
        by_query = {field.name for field in route.dependant.query_params}
        if "policy" in by_query or "{policy}" in route.path:
            found.append(f"{route.path.format(policy='nobody', version=0)}?policy=nobody&records=turns")
    return found


async def test_on_the_page(page: Page) -> None:
    found = paths("/ui")
    assert len(found) > 8
    async with page.visitor() as visitor:
        for path in found:
            answer = await visitor.client.get(path)
            assert (answer.status_code, "no policy 'nobody'" in html.unescape(answer.text)) == (404, True), path


async def test_over_rest(page: Page) -> None:
    found = paths("/admin")
    assert len(found) > 8
    async with httpx.AsyncClient(
        base_url=page.url, headers={"Authorization": f"Bearer {page.admin_key}"}, timeout=60
    ) as client:
        for path in [*found, "/admin/v1/sessions?policy=nobody&text=words"]:
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "policy_not_found"), path
            assert "'nobody'" in answer.json()["detail"], path


async def test_by_a_command(page: Page, tmp_path: Path) -> None:
    commands = (
        "session list",
        "session list --text words",
        f"export --out {tmp_path / 'turns.jsonl'}",
        "rollouts groups",
        "rollouts status",
        "episode list",
        "probe list",
        "recipe show",
        "training status",
        "policy events",
    )
    for command in commands:
        asked = [*command.split(), "--policy", "nobody"]
        done = await asyncio.to_thread(clawloop, *asked, DATABASE_URL=page.database_url)
        assert "'nobody'" in refusal(done), command


# What a command prints with `--json` is what its route answers.

SAME = {
    ("session", "list", "--all"): "sessions",
    ("session", "show", "first"): "sessions/first?content=true",
    ("why", "first:1"): "turns/first:1/why",
    ("policy", "list"): "policies",
    ("policy", "versions"): "policies/default/versions",
    ("policy", "events"): "policies/default/events",
    ("engine", "list"): "engines",
    ("key", "list"): "keys",
    ("status",): "status",
    ("training", "status"): "training",
    ("training", "liked"): "training/liked",
}
# Problems are those of the process that is asked: the gateway here has no Temporal.
OF_THE_PROCESS = {"problems"}


def _comparable(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _comparable(value) for name, value in found.items() if name not in OF_THE_PROCESS}
    return [_comparable(one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("command", SAME, ids=" ".join)
async def test_a_command_prints_what_its_route_answers(page: Page, command: tuple[str, ...]) -> None:
    first, _ = await page.recorder.chat("first", "Explain the tides", CHANGED)
    await page.recorder.judge(first, -1, HINT)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    settings = {"DATABASE_URL": page.database_url}
    printed = json.loads((await asyncio.to_thread(clawloop, *command, "--json", **settings)).stdout)
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        answer = await client.get(f"/admin/v1/{SAME[command]}")
    assert answer.status_code == 200, answer.text
    assert _comparable(printed) == _comparable(answer.json())
