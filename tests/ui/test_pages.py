"""What the page shows of sessions, replies and versions, and what its buttons do."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator

import httpx
import pytest

from clawloop.core.contracts.serving import KeyLimits
from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import Pace, StepState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import Gate
from clawloop.operations.workflow_links import WorkflowLinks
from tests.contract.episodes import run_group
from tests.contract.learning import POLICY, RECIPE, publish, reject, step
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT

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
    async with page.visitor() as visitor:
        shown = html.unescape(await visitor.get(f"/ui/sessions/{await session_of(page, turn)}"))
    for words in ("Explain s1", "A long answer. (1)", CHANGED, "▼ blamed", HINT, "It was too long.", "verdict -1"):
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
        assert (refused.status_code, "`outcome` cannot be" in html.unescape(refused.text)) == (400, True)


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
    await reject(page.learning, 2, reason="it moved too far")
    async with page.visitor() as visitor:
        shown = html.unescape(await visitor.get("/ui/versions/1"))
        meanings = ("size of the gradient before clipping", "<dt>Head</dt><dd>training goes on from it")
        for words in ("Explain first", "A long answer. (1)", HINT, f"#turn-{first}", "grad norm", *meanings):
            assert words in shown, words
        rejected = html.unescape(await visitor.get("/ui/versions/2"))
        assert "it moved too far" in rejected
        assert "Release it" in rejected
        tree = await visitor.get("/ui/versions")
        assert "<b>rejected</b>: the gate did not accept it" in tree
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
        assert "<b>resumed</b>" in shown


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
        assert "waits for what comes next" in recorded
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


async def test_the_limits_of_a_key_hold_on_the_page_too(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.services[0].key_limits, "_clock", lambda: 1000.0)  # nothing is refilled
    prefix = page.admin_key[: len("cl-00000000")]
    await page.services[0].key_uses.set_limits(prefix, KeyLimits(requests_per_minute=2))
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
