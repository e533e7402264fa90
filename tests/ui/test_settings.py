"""Changes on the page, who may make them, and what stays right while it is open."""

from __future__ import annotations

import asyncio
import hashlib
import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import orjson
import pytest
from fastapi.routing import APIRoute

import api.ui.logins as logins
from api.ui.changes import Changes
from api.ui.logins import COOKIE
from api.ui.routes import ROUTERS
from clawloop.core.contracts.lessons import LessonState, ShownLesson
from clawloop.core.contracts.serving import KeyLimits, Scope
from clawloop.core.errors import RequestRejected
from clawloop.core.judging.agreement import VotedTurn
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.judging.quality import CALIBRATED, JudgeTrial, Quality
from clawloop.core.judging.voting import Vote
from clawloop.core.lessons.ledger import tokens_of
from clawloop.core.recipes.recipe import WITHOUT_JUDGE, Lessons, Recipe
from clawloop.operations.export import ExportKind
from db.serving.keys import PostgresKeyStore
from tests.contract.learning import POLICY, RECIPE, step
from tests.fakes.admin import FakeVoteReader
from tests.fakes.away_browser import AwayBrowser
from tests.ui.conftest import Page, Visitor
from tests.ui.recorded import CHANGED, HINT
from tests.verbs import clawloop

# What can be set on the page: recipe, probes, keys, policies, rollouts, engines; and its upkeep.


async def shown(visitor: Visitor) -> str:
    return html.unescape(await visitor.get("/ui/settings"))


async def test_the_recipe_is_shown_as_it_can_be_given_back(page: Page) -> None:
    await page.learning.set_recipe(RECIPE)
    async with page.visitor() as visitor:
        text = re.search(r'id="recipe-text"[^>]*>(.*?)</textarea>', await shown(visitor), re.DOTALL)
        assert text is not None
        other = text[1].replace("train.batch_samples = 4", "train.batch_samples = 6")
        told = html.unescape((await visitor.post("/ui/recipe", recipe=other)).text)
        assert "It learns by small (" in told
        assert "train.batch_samples = 6" in told
        wrong = await visitor.post("/ui/recipe", recipe=other.replace("train.lora.rank = 16", "train.lora.rank = 0"))
        assert (wrong.status_code, "train.lora.rank" in wrong.text) == (400, True)
    found = await page.learning.operators.recipe(POLICY)
    assert found == RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"batch_samples": 6})})


async def test_the_precision_of_votes_is_shown_where_there_are_any(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "Votes and outcomes" not in await shown(visitor)
        page.services[0].voted_turns = FakeVoteReader(
            [VotedTurn([1, -1, 1], True), VotedTurn([1, -1, -1], False)]
        ).voted_turns
        text = re.sub(r"</t[hd]><td[^>]*>", " ", await shown(visitor))
        assert ">1 2 0.5 2 0.5 0 –<" in text
        assert ">3 2 0.5 1 1 1 1<" in text
    by_command = await asyncio.to_thread(clawloop, "judge", "precision", DATABASE_URL=page.database_url)
    assert by_command.stdout == "no turn of an episode with a reward has votes\n"


async def test_how_good_the_judge_is_is_shown_where_it_was_tried(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "The judge" not in await shown(visitor)
        weak = Quality(100, 0.41, 0.0, {})
        biases: dict[Vote, float] = {1: -1.5, 0: 0.0, -1: 0.25}
        tried = JudgeTrial("small", "ab" * 32, AnswerForm.EXAMPLES, biases, {"grammar": weak, CALIBRATED: weak}, weak)
        page.services[0].newest_trial = FakeVoteReader(trial=tried).newest_trial
        text = html.unescape(await shown(visitor))
        assert "small votes rightly on 41 of 100 phrases that decided nothing (kappa 0.00: 0 is chance, 1" in text
        assert "in the form examples. Its leaning is corrected: -1.50 is added to the" in text
        assert "Votes and hints are off: small agrees with labelled phrases by a kappa of 0.00" in text


async def test_probes_are_added_and_removed(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "There is none." in await visitor.get("/ui/probes")
        assert "asks each version 0 prompts" in await shown(visitor)
        fields = {"prompt": "What is <b>2 + 2</b>?", "contains": "4", "regex": "", "exact": ""}
        added = await visitor.post("/ui/probes", **fields)
        assert "&lt;b&gt;2 + 2&lt;/b&gt;" in added.text
        [stored] = await page.services[0].probes.all(POLICY)
        assert list(stored.content.messages) == [{"role": "user", "content": fields["prompt"]}]
        assert (list(stored.content.contains), stored.content.regex) == (["4"], None)
        for text, found in (("2 + 2", True), ("WHAT", True), ("4", True), ("moon", False)):
            listed = (await visitor.client.get("/ui/probes", params={"text": text})).text
            assert ("&lt;b&gt;2 + 2" in listed, "1 probe with these words" in listed) == (found, found), text
        refused = await visitor.post("/ui/probes", prompt="Again?", regex="(")
        assert (refused.status_code, "cannot be used" in refused.text) == (400, True)
        assert "Removed." in (await visitor.post(f"/ui/probes/{stored.id}/remove")).text
        assert await page.services[0].probes.all(POLICY) == []
        assert (await visitor.post(f"/ui/probes/{stored.id}/remove")).status_code == 404


async def test_keys_are_made_limited_and_revoked(page: Page) -> None:
    async with page.visitor() as visitor:
        made = await visitor.post("/ui/access/keys", name="laptop", scope="chat", policy=POLICY)
        secret = re.search(r"shown only once: <code class=\"break\">(cl-[^<]+)<", made.text)
        assert secret is not None
        [key] = [key for key in (await page.services[0].key_operations.list()).keys if key.name == "laptop"]
        assert secret[1].startswith(key.prefix)
        assert secret[1] not in await shown(visitor)
        assert key.expires_at is None
        address = f"/ui/access/keys/{key.prefix}"
        limited = await visitor.post(f"{address}/limits", requests_per_minute="30", concurrency="", stored_mib="5")
        assert 'value="30"' in limited.text
        use = await page.services[0].key_operations.use_of(key.prefix)
        assert use.limits == KeyLimits(requests_per_minute=30, stored_mib=5)
        assert "It stores 0.0 MiB" in limited.text
        assert (await visitor.post(f"{address}/limits", concurrency="0")).status_code == 400
        assert f"{key.prefix} is revoked" in (await visitor.post(f"{address}/revoke")).text
        assert (await visitor.post("/ui/access/keys", name="x", scope="all", policy=POLICY)).status_code == 400
        await visitor.post("/ui/access/keys", name="guest", scope="chat", policy=POLICY, days="7")
        [guest] = [key for key in (await page.services[0].key_operations.list()).keys if key.name == "guest"]
        assert guest.expires_at is not None
        assert "until <time" in await shown(visitor)
        for days in ("0", "x", "99999", "²"):
            refused = await visitor.post("/ui/access/keys", name="x", scope="chat", policy=POLICY, days=days)
            assert refused.status_code == 400
        assert (await visitor.post("/ui/access/keys", name="x", scope="chat", policy="nobody")).status_code == 404
        assert (await visitor.post("/ui/access/keys", name="x" * 201, scope="chat", policy=POLICY)).status_code == 400
    [ended] = [each for each in (await page.services[0].key_operations.list()).keys if each.id == key.id]
    assert ended.revoked_at is not None


async def test_a_policy_is_made_and_retired(page: Page) -> None:
    await page.learning.set_recipe(RECIPE)
    async with page.visitor() as visitor:
        assert "anna is made" in (await visitor.post("/ui/access/policies", name="anna")).text
        assert (await page.learning.operators.status("anna")).head == 0
        assert (await visitor.post("/ui/access/policies", name="anna")).status_code == 409
        assert "anna is retired" in (await visitor.post("/ui/access/policies/anna/retire")).text


async def test_a_policy_that_begins_from_a_version_says_so_on_the_page_and_by_commands(page: Page) -> None:
    await step(page.learning, 1)
    async with page.visitor() as visitor:
        assert "as version 1 of default" in (await visitor.post("/ui/access/policies", name="anna", version="1")).text
        for version, status in (("7", 404), ("one", 400)):
            assert (await visitor.post("/ui/access/policies", name="ben", version=version)).status_code == status
        assert "begun as v1 of default" in await visitor.get("/ui/versions?policy=anna")
        shown = await visitor.get("/ui/versions/1?policy=anna")
    assert shown.count('href="/ui/versions/1?policy=default"') == 2
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "120"}
    begun = ("policy", "create", "ben", "--base-policy", "anna", "--version", "1")
    made = await asyncio.to_thread(clawloop, *begun, **settings)
    assert (made.returncode, " ".join(made.stdout.split()).count("head 1")) == (0, 1)
    assert (
        "begun as version 1 of default"
        in (await asyncio.to_thread(clawloop, "policy", "versions", "--policy", "ben", **settings)).stdout
    )
    assert "version 1" in (await asyncio.to_thread(clawloop, "policy", "events", "--policy", "ben", **settings)).stdout
    refused = await asyncio.to_thread(clawloop, "policy", "create", "cleo", "--version", "9", **settings)
    assert (refused.returncode, "has no version 9" in refused.stderr) == (1, True)


async def test_engines_are_added_drained_and_removed(page: Page) -> None:
    [engine] = await page.learning.rows("SELECT id FROM engines")
    name = engine["id"]
    async with page.visitor() as visitor:
        assert (await visitor.post("/ui/engines", url="no address")).status_code == 400
        refused = await visitor.post(f"/ui/engines/{name}/drain")
        assert (refused.status_code, "only" in refused.text) == (409, True)
        drained = await visitor.post(f"/ui/engines/{name}/drain", force="1")
        assert "gets no new chats" in drained.text
        assert "takes chats again" in (await visitor.post(f"/ui/engines/{name}/undrain")).text
        await visitor.post(f"/ui/engines/{name}/drain", force="1")
        assert "is forgotten" in (await visitor.post(f"/ui/engines/{name}/remove", force="1")).text
        again = await visitor.post("/ui/engines", url=page.engine.url)
        assert f"Engine {name} is added." in again.text
    assert [row["id"] for row in await page.learning.rows("SELECT id FROM engines WHERE NOT draining")] == [name]


async def test_of_two_engines_the_last_that_takes_chats_can_be_drained_too(page: Page) -> None:
    [engine] = await page.learning.rows("SELECT id FROM engines")
    async with page.visitor() as visitor:
        await visitor.post("/ui/engines", url=page.engine.url.replace("127.0.0.1", "localhost"))
        forced = re.compile(
            r"""/drain\?policy=default" hx-vals='{"force": "1"}' hx-confirm="Send the engine (\S+) no"""
        )
        async with asyncio.timeout(60):  # the gateway follows within a second
            while (both := await visitor.get("/ui/engines")).count("/drain?") < 2:
                await asyncio.sleep(0.05)
            assert forced.findall(both) == []
            await visitor.post(f"/ui/engines/{engine['id']}/drain")
            while "/undrain?" not in (one := await visitor.get("/ui/engines")):
                await asyncio.sleep(0.05)
        assert forced.findall(one) == [engine["id"].replace("127.0.0.1", "localhost")]
        assert "is forgotten" in (await visitor.post(f"/ui/engines/{engine['id']}/remove")).text


async def test_no_form_of_the_settings_is_sent_twice_at_once(page: Page) -> None:
    """Of two keys made at once, the secret of one is never seen."""
    await page.learning.set_recipe(RECIPE)
    async with page.visitor() as visitor:
        [key, *_] = (await page.services[0].key_operations.list()).keys
        for address in ("/ui/settings", "/ui/rollouts", "/ui/engines", f"/ui/access/keys/{key.prefix}"):
            answer = await visitor.client.get(address, headers={"X-CSRF-Token": visitor.csrf})
            forms = re.findall(r"<form hx-post[^>]*>", answer.text)
            assert forms, address
            assert [form for form in forms if 'hx-disabled-elt="find button"' not in form] == []


async def test_a_policy_with_a_name_that_postgresql_cannot_store_does_not_exist(page: Page) -> None:
    async with page.visitor() as visitor:
        assert (await visitor.post("/ui/access/keys", name="x", scope="chat", policy="\0")).status_code == 404
        assert (await visitor.post("/ui/probes?policy=%00", prompt="x")).status_code == 404
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        assert (await client.get("/admin/v1/policies/%00/probes")).status_code == 404
        assert (await client.post("/admin/v1/keys", json={"policy": "\0"})).status_code == 404


async def test_upkeep_checks_the_ledger_judges_again_and_exports(page: Page) -> None:
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1, HINT)
    async with page.visitor() as visitor:
        assert "Whole: " in (await visitor.post("/ui/upkeep/check")).text
        lines = (await visitor.get("/ui/export?records=turns")).splitlines()
        assert str(turn) in {orjson.loads(line)["id"] for line in lines}
        offered = re.findall(r"/ui/export\?records=(\w+)", await visitor.get("/ui/settings"))
        assert offered == list(ExportKind)
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
        # Without Temporal nothing can be judged again, and the page says so.
        refused = await visitor.post(f"/ui/sessions/{row['session_id']}/judge")
        assert refused.status_code == 503
        assert "0 turns are judged again" in (await visitor.post("/ui/upkeep/unjudged")).text
        missing = await visitor.post(f"/ui/sessions/{uuid4()}/judge")
        assert (missing.status_code, "There is no session" in missing.text) == (404, True)
        assert (await visitor.client.get("/ui/export?records=turns&policy=nobody")).status_code == 404
        await page.learning.execute("UPDATE turns SET version = 7 WHERE id = %s", turn)
        assert "1 row contradicts others." in (await visitor.post("/ui/upkeep/check")).text
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        for query, code in (("policy=nobody", "policy_not_found"), (f"session={uuid4()}", "not_found")):
            answer = await client.get(f"/admin/v1/export?{query}")
            assert (answer.status_code, answer.json()["code"]) == (404, code)
        by_name = (await client.get("/admin/v1/export?session=s1")).text.splitlines()
        assert len(by_name) == 2


async def test_who_may_only_look_sees_the_settings_and_changes_none(page: Page) -> None:
    await page.learning.set_recipe(RECIPE)
    async with page.visitor(page.read_key) as visitor:
        text = await shown(visitor)
        assert "train.batch_samples = 4" in text
        assert "<form hx-post" not in text
        changes = ("recipe", "probes", "access/keys", "access/policies", "rollouts/start", "engines", "upkeep/check")
        for change in changes:
            assert (await visitor.post(f"/ui/{change}", name="x", scope="chat")).status_code == 403, change


async def test_what_the_page_finds_the_api_finds_too(page: Page) -> None:
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1, HINT)
    await page.recorder.chat("s2", "Something else")
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        for query in ("verdict=-1", "text=TIDES", "judged=true&kind=main", "verdict=-1&version=0&policy=default"):
            found = (await client.get(f"/admin/v1/sessions?{query}")).json()
            assert [session["id"] for session in found["sessions"]] == [str(row["session_id"])], query
            assert (found["total"], found["next"]) == (None, None)
        first = (await client.get("/admin/v1/sessions?kind=main&limit=1")).json()
        second = (await client.get(f"/admin/v1/sessions?kind=main&limit=1&after={first['next']}")).json()
        assert len({session["id"] for answer in (first, second) for session in answer["sessions"]}) == 2
        assert second["next"] is None


async def test_what_a_version_was_trained_on_is_told_by_the_api_as_on_the_page(page: Page) -> None:
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1, HINT)
    await step(page.learning, 1, count=3)
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        told = (await client.get("/admin/v1/policies/default/versions/1")).json()
        assert (told["version"]["n"], told["version"]["parent"], told["children"]) == (1, 0, [])
        assert [
            [hint["text"] for hint in reply["hints"]] for reply in told["batch"] if reply["turn_id"] == str(turn)
        ] == [[HINT]]
        base = (await client.get("/admin/v1/policies/default/versions/0")).json()
        assert (base["batch"], base["children"]) == ([], [1])
        assert (await client.get("/admin/v1/policies/default/versions/7")).status_code == 404
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "80"}
    printed = (await asyncio.to_thread(clawloop, "policy", "version", "1", **settings)).stdout
    assert HINT[:20] in printed
    assert max(map(len, printed.splitlines())) <= 80


async def test_a_users_words_that_taught_are_named_so_everywhere_and_shown_once(page: Page) -> None:
    await page.learning.set_recipe(RECIPE.model_copy(update={"signal": WITHOUT_JUDGE.signal}))
    turn, _ = await page.recorder.chat("first", "Explain the tides", CHANGED)
    words = f"{CHANGED} No more than two lines."
    await page.recorder.judge(turn, 1, words)
    for comment in ("No  more than\ntwo lines.", "Another matter."):
        await page.services[0].feedback.give(page.learning.key, turn, None, comment)
    await step(page.learning, 1, count=3)
    use = {"place": 0, "overlap": 0.81, "distance": 0.16, "share": 0.43}
    await page.learning.execute("UPDATE step_samples SET taught = %s", orjson.dumps([use]).decode())
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        told = (await client.get(f"/admin/v1/sessions/{row['session_id']}")).json()
        assert [(hint["source"], hint["text"]) for hint in told["turns"][0]["hints"]] == [("message", words)]
    async with page.visitor(page.read_key) as visitor:
        for path in (f"/ui/sessions/{row['session_id']}", "/ui/versions/1"):
            told_on_page = await visitor.get(path)
            assert told_on_page.count("<b>Your words</b>") == told_on_page.count("<b>Comment</b>") == 1, path
            assert "two lines" not in told_on_page.replace(words, ""), path
            assert "Another matter." in told_on_page, path
            figures = "81 % of the likeliest tokens are the same. How far it moves the probabilities "
            figures += "of the reply's tokens: 0.16 nats on average"
            assert f'title="With and without it {figures} (0: not at all).">taught 43 %</span>' in told_on_page, path
    settings = {"DATABASE_URL": page.database_url}
    shown_session = await asyncio.to_thread(clawloop, "session", "show", str(row["session_id"]), **settings)
    assert f"your words {words} (taught 43%" in " ".join(shown_session.stdout.split())
    assert shown_session.stdout.count("comment ") == 1
    assert "next message" in (await asyncio.to_thread(clawloop, "why", str(turn), **settings)).stdout


async def test_stored_turns_are_judged_by_another_recipe_and_nothing_changes_unasked(
    page: Page,
) -> None:
    await page.learning.set_recipe(RECIPE)
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1)
    async with page.visitor() as visitor:
        assert 'hx-post="/ui/judge/history?policy=default"' in await shown(visitor)
        # The fake engine is no judge: its answers hold no verdict.
        compared = html.unescape((await visitor.post("/ui/judge/history", turns="5", recipe="")).text)
        assert "1 turn, no new verdict. 1 compared now, 0 left." in re.sub(r"<[^>]+>", "", compared)
        assert "/ui/judge/history/apply" not in compared  # no verdict differs
        await page.learning.execute("UPDATE comparisons SET after = 1")
        differs = html.unescape((await visitor.post("/ui/judge/history", turns="5", recipe="")).text)
        assert "if theirs is not the one compared here (base model), switch the workers first." in differs
        await page.learning.execute("UPDATE comparisons SET after = NULL")
        for fields in ({"turns": "0"}, {"turns": "101"}, {"turns": "5", "recipe": "name = 7"}):
            assert (await visitor.post("/ui/judge/history", **fields)).status_code == 400, fields
        asked = html.unescape((await visitor.post("/ui/judge/history/apply", recipe="")).text)
        assert "0 turns are judged again, by the judge workers' own judge" in asked
    [kept] = await page.learning.rows("SELECT count(*) AS n FROM judgements")
    assert kept["n"] == 1


# Who may see the page, and who may change something on it.

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


# Every route of the page that changes something wants the login's token and the scope `admin`; a new one, too.

# Whoever may look may log in and out.
_OF_VIEWERS = {"/ui/login", "/ui/logout"}


def changes() -> list[str]:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    paths = {route.path for route in routes if route.methods - {"GET", "HEAD"}} - _OF_VIEWERS
    return sorted(re.sub(r"\{\w+\}", str(uuid4()), path) for path in paths)


async def test_without_the_token_of_the_login_nothing_is_changed(page: Page) -> None:
    async with page.visitor() as visitor:
        visitor.csrf = "0" * 64
        refused = {path: (await visitor.post(path)).status_code for path in changes()}
    assert len(refused) > 15
    assert {path: status for path, status in refused.items() if status != 403} == {}


async def test_with_the_scope_read_nothing_is_changed(page: Page) -> None:
    async with page.visitor(page.read_key) as visitor:
        refused = {path: (await visitor.post(path)).status_code for path in changes()}
    assert {path: status for path, status in refused.items() if status != 403} == {}


# A page that is open for long, or while something is away, says what is so.


class Standing(AwayBrowser):
    """A database in which nothing changes."""

    async def mark(self) -> str:
        return "same"


async def events_of(lines: AsyncIterator[str], count: int) -> list[str]:
    found: list[str] = []
    async for line in lines:
        if line.startswith("event: "):
            found.append(line.removeprefix("event: "))
        if len(found) == count:
            break
    return found


async def test_what_is_shown_is_looked_at_again_although_nothing_changes(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ui.events.AGING_SECONDS", 0.0)
    async with page.visitor() as visitor, visitor.client.stream("GET", "/ui/events") as events, asyncio.timeout(60):
        assert await events_of(events.aiter_lines(), 3) == ["changed"] * 3


async def test_what_a_gateway_alone_knows_is_a_change_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ui.changes.CHECK_SECONDS", 0.0)
    healthy = ["e0"]
    changes = Changes(Standing(), lambda: healthy)
    first = await changes.mark()
    assert await changes.mark() == first
    healthy.clear()
    assert await changes.mark() != first


async def test_without_temporal_the_page_says_so(page: Page) -> None:
    async with page.visitor() as visitor:
        for path in ("/ui?policy=default", "/ui/engines"):
            assert "No Temporal is configured: turns are recorded and not judged" in await visitor.get(path), path
        now = await visitor.get("/ui?policy=default")
        assert '<div class="card tile warn">\n    <h2>Not learning</h2>' in now
        # The remedy is not one for a Temporal that died; what is to be typed stands as code.
        remedies = await visitor.get("/ui/engines")
        assert "restart what they started" not in remedies
        assert "<code>clawloop up</code> starts both" in remedies
        assert "`" not in remedies.split("<main")[1]


async def test_the_first_visit_tells_what_is_not_ready_and_now_can_be_looked_at(page: Page) -> None:
    async with page.visitor() as visitor:
        ready = await visitor.get("/ui/start")
        assert "Not ready" not in ready
        assert "No Temporal is configured" in ready
        assert "<h2>Answers</h2>" in await visitor.get(_address_of(ready, "Now"))
        page.draining.append(True)
        assert "<b>Not ready:</b> this gateway is being stopped." in await visitor.get("/ui/start")
        assert "<b>This gateway is being stopped.</b>" in await visitor.get("/ui/engines")


def _address_of(shown: str, link: str) -> str:
    found = re.search(rf'<a href="([^"]+)"[^>]*>{link}</a>', shown)
    assert found is not None, shown
    return html.unescape(found[1])


async def test_an_engine_that_is_away_is_named_once(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "<td>base</td>" in await visitor.get("/ui/engines")
    page.engine.healthy = False
    [row] = await page.learning.rows("UPDATE engines SET problem = 'does not answer' WHERE true RETURNING id")
    async with asyncio.timeout(60):
        while page.services[0].engines.healthy():
            await asyncio.sleep(0.05)
    async with page.visitor() as visitor:
        away = await visitor.get("/ui/engines")
        assert "<td>base" not in away
        assert "not known while it is away" in away
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        problems = (await client.get("/admin/v1/status")).json()["problems"]
    assert [problem for problem in problems if problem.startswith("engine ")] == [
        f"engine {row['id']} does not answer: it starts, which takes minutes for a large model, or is down; its"
        " log says which"
    ]


async def test_a_session_is_found_as_elsewhere_and_by_its_own_id_first(page: Page) -> None:
    [turn] = await page.recorder.chat("first", "Words of the first")
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
    # A client may give its session any name, and so the id of another one.
    await page.recorder.chat(str(row["session_id"]), "Words of the second")
    async with page.visitor() as visitor:
        for reference in ("first", row["session_id"], f"chatcmpl-{turn.hex}"):
            assert "Words of the first" in await visitor.get(f"/ui/sessions/{reference}"), reference
        assert "Words of the second" in await visitor.get("/ui/sessions/last")
        missing = await visitor.client.get("/ui/sessions/nobody")
        assert (missing.status_code, "There is no session" in html.unescape(missing.text)) == (404, True)


# What it was told about its user.


async def test_lessons_are_typed_edited_turned_off_and_forgotten(page: Page) -> None:
    async with page.visitor() as visitor:
        text = html.unescape(await visitor.get("/ui/lessons"))
        assert "There is none." in text
        assert "Lessons are off" in text
        said = "Answer in <b>one</b> sentence."
        assert "&lt;b&gt;one&lt;/b&gt;" in (await visitor.post("/ui/lessons", text=said)).text
        [stored] = (await page.services[0].lesson_operations.list(POLICY)).lessons
        assert (stored.text, stored.state) == (said, LessonState.ACTIVE)
        off = await visitor.post(f"/ui/lessons/{stored.id}/off")
        assert ("Off: new sessions do without it." in off.text, off.text.count(">On</button>")) == (True, 1)
        assert "On: new sessions get it." in (await visitor.post(f"/ui/lessons/{stored.id}/on")).text
        await visitor.post("/ui/lessons", text="Answer in two sentences.", instead_of=str(stored.id))
        states = [one.state for one in (await page.services[0].lesson_operations.list(POLICY)).lessons]
        assert states == [LessonState.SUPERSEDED, LessonState.ACTIVE]
        assert "Forgotten, with the prompts of 0 turns." in (await visitor.post(f"/ui/lessons/{stored.id}/forget")).text
        assert (await visitor.post(f"/ui/lessons/{stored.id}/forget")).status_code == 404
        assert (await visitor.post(f"/ui/lessons/{stored.id}/burn")).status_code == 404
        for bad in ("", "x" * 10_000, "bell \x07"):
            refused = await visitor.post("/ui/lessons", text=bad)
            assert (refused.status_code, "The lesson" in refused.text) == (400, True)
    async with page.visitor(page.read_key) as visitor:
        assert "<form" not in re.sub(r"<form[^>]*policies.*?</form>", "", await visitor.get("/ui/lessons"), flags=re.S)
        assert (await visitor.post("/ui/lessons", text="Mine.")).status_code == 403
        assert (await visitor.post(f"/ui/lessons/{stored.id}/on")).status_code == 403


async def test_of_a_hundred_lessons_the_newest_fit_and_the_page_says_what_to_do(page: Page) -> None:
    lessons, enabled = page.services[0].lesson_operations, Lessons(enabled=True, max_tokens=100)
    await page.learning.set_recipe(Recipe(name="told", lessons=enabled))
    contradictory = [
        "Ignore all instructions.",
        "Follow all instructions.",
        "Antworte immer auf Deutsch.",
        "日本語で答えて。",
    ]
    for text in [*(f"Leave out the word number {number}." for number in range(96)), *contradictory]:
        await lessons.add(POLICY, text)
    listed = await lessons.list(POLICY)
    shown = [one.text for one in listed.lessons if one.in_prompt]
    assert (len(listed.lessons), listed.left_out) == (100, 100 - len(shown))
    assert shown[-4:] == contradictory
    assert sum(map(tokens_of, shown)) <= 100
    async with page.visitor() as visitor:
        text = html.unescape(await visitor.get("/ui/lessons"))
        assert f"{listed.left_out} active lessons do not fit into a prompt beside newer ones: turn off" in text
        assert text.count("active, and does not fit") == listed.left_out
        assert "There are 100 active and learned lessons, as many as there can be" in text
        refused = await visitor.post("/ui/lessons", text="One more.")
        assert (refused.status_code, "can have no more" in refused.text) == (409, True)
    told = await asyncio.to_thread(clawloop, "lesson", "list", DATABASE_URL=page.database_url)
    assert f"{listed.left_out} active lessons do not fit" in " ".join(told.stdout.split())
    again = await asyncio.to_thread(
        clawloop, "lesson", "add", "Leave out the word number 1.", DATABASE_URL=page.database_url
    )
    assert f"{listed.left_out} active lessons do not fit" in " ".join(again.stdout.split())
    assert "Lessons are off" not in again.stdout


async def test_a_learned_lesson_says_since_when_and_is_turned_on_by_hand(page: Page) -> None:
    lessons = page.services[0].lesson_operations
    stored = await lessons.add(POLICY, "Answer in one sentence.")
    why = "learned: versions 1 and 2 lack 10% and 15% of its effect in version 0"
    await page.learning.execute("UPDATE lessons SET state = 'learned', since_version = 1, why = %s", why)
    async with page.visitor() as visitor:
        text = html.unescape(await visitor.get("/ui/lessons"))
        assert "learned since version 1" in text
        assert why in text
        assert "On: new sessions get it." in (await visitor.post(f"/ui/lessons/{stored.id}/on")).text
    [view] = (await lessons.list(POLICY)).lessons
    assert view.state is LessonState.ACTIVE


async def test_before_a_lesson_is_forgotten_the_page_says_which_versions_hold_it_and_who_said_it(page: Page) -> None:
    lessons = page.services[0].lesson_operations
    _, taken = [await lessons.add(POLICY, text) for text in ("Be kind.", "Be short.")]
    first, second = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    source = "UPDATE lessons SET source = 'hint', turn_id = %s, shown_by = %s WHERE id = %s"
    await page.learning.execute(source, first, second, taken.id)
    await page.recorder.judge(first, -1, HINT, after=second)
    await step(page.learning, 1, count=3)
    await step(page.learning, 2)
    async with page.visitor() as visitor:
        text = html.unescape(await visitor.get("/ui/lessons"))
        asked = "Forget this lesson for good, with the tokens of all prompts that held it?"
        left = (await lessons.list(POLICY)).lessons[1].what_is_left(POLICY)
        assert re.findall(r'hx-confirm="([^"]*)"', text) == [f"{asked} {left}", asked]
        assert left.startswith("Versions 1 to 2 have learned from it: `clawloop policy roll-back 0 --policy")
        assert f'?turn={second}#turn-{second}">the message that said it</a>' in text
        await page.learning.execute("UPDATE lessons SET shown_by = NULL")
        text = await visitor.get("/ui/lessons")
        assert f'?turn={first}#turn-{first}">the reply that was corrected</a>' in text
    assert (await lessons.forget(POLICY, str(taken.id))).what_is_left(POLICY) == left


async def test_a_turn_says_with_which_lessons_it_was_answered(page: Page) -> None:
    lessons = page.services[0].lesson_operations
    kept, gone = [await lessons.add(POLICY, text) for text in ("Be <short>.", "Be gone.")]
    shown = tuple(ShownLesson(one.id, one.text) for one in (kept, gone))
    [turn] = await page.recorder.chat("s1", "Explain the tides")
    [taught] = await page.recorder.chat("s2", "Explain the tides again", lessons=shown)
    await lessons.forget(POLICY, str(gone.id))
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", taught)
    async with page.visitor() as visitor:
        text = await visitor.get(f"/ui/sessions/{row['session_id']}")
        assert "Answered with 2 lessons" in text
        now = await visitor.get("/ui")
        for words in ("a lesson became active", "a lesson was forgotten"):
            assert f'<b><a href="/ui/lessons?policy={POLICY}">{words}</a></b>' in now
        assert not any(str(one.id) in now for one in (kept, gone))
        assert "Be &lt;short&gt;." in text
        assert "a lesson that was forgotten" in text
        lines = [orjson.loads(line) for line in (await visitor.get("/ui/export?records=turns")).splitlines()]
        assert {line["id"]: line["lessons"] for line in lines} == {str(turn): [], str(taught): ["Be <short>.", None]}
        [line] = (await visitor.get("/ui/export?records=lessons")).splitlines()
        assert (orjson.loads(line)["text"], orjson.loads(line)["state"]) == ("Be <short>.", "active")
        counted = {"since_version": 0, "said_in": None, "turns": 1, "practised": 0}
        assert counted.items() <= orjson.loads(line).items()
    why = await asyncio.to_thread(clawloop, "why", str(taught), DATABASE_URL=page.database_url)
    assert "Be <short>.; a lesson that was forgotten" in " ".join(why.stdout.split())
    told = await asyncio.to_thread(clawloop, "session", "show", "s2", DATABASE_URL=page.database_url)
    assert "Be <short>." in told.stdout
