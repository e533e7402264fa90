"""What can be set on the page: recipe, probes, keys, policies, rollouts, engines; and its upkeep."""

from __future__ import annotations

import asyncio
import html
import re
from uuid import uuid4

import httpx
import orjson

from clawloop.core.contracts.serving import KeyLimits
from clawloop.core.judging.agreement import VotedTurn
from tests.contract.learning import POLICY, RECIPE, step
from tests.fakes.vote_reader import FakeVoteReader
from tests.ui.conftest import Page, Visitor
from tests.ui.recorded import CHANGED, HINT
from tests.verbs import clawloop


async def shown(visitor: Visitor) -> str:
    return html.unescape(await visitor.get("/ui/settings"))


async def test_the_recipe_is_shown_as_it_can_be_given_back(page: Page) -> None:
    await page.learning.set_recipe(RECIPE)
    async with page.visitor() as visitor:
        text = re.search(r"required>(.*?)</textarea>", await shown(visitor), re.DOTALL)
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


async def test_probes_are_added_and_removed(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "There is none." in await shown(visitor)
        fields = {"prompt": "What is <b>2 + 2</b>?", "contains": "4", "regex": "", "exact": ""}
        added = await visitor.post("/ui/probes", **fields)
        assert "&lt;b&gt;2 + 2&lt;/b&gt;" in added.text
        [stored] = await page.services[0].probes.all(POLICY)
        assert list(stored.content.messages) == [{"role": "user", "content": fields["prompt"]}]
        assert (list(stored.content.contains), stored.content.regex) == (["4"], None)
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
        use = await page.services[0].key_uses.use_of(key.prefix)
        assert use is not None
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
        in (await asyncio.to_thread(clawloop, "policy", "versions", "ben", **settings)).stdout
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
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
        # Without Temporal nothing can be judged again, and the page says so.
        refused = await visitor.post(f"/ui/sessions/{row['session_id']}/judge")
        assert refused.status_code == 503
        assert "0 turns are judged again" in (await visitor.post("/ui/upkeep/unjudged")).text
        missing = await visitor.post(f"/ui/sessions/{uuid4()}/judge")
        assert (missing.status_code, "There is no session" in missing.text) == (404, True)
        assert (await visitor.client.get("/ui/export?records=turns&policy=nobody")).status_code == 404
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
        assert [reply["hint"] for reply in told["batch"] if reply["turn_id"] == str(turn)] == [HINT]
        base = (await client.get("/admin/v1/policies/default/versions/0")).json()
        assert (base["batch"], base["children"]) == ([], [1])
        assert (await client.get("/admin/v1/policies/default/versions/7")).status_code == 404
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "80"}
    printed = (await asyncio.to_thread(clawloop, "policy", "version", "1", **settings)).stdout
    assert HINT[:20] in printed
    assert max(map(len, printed.splitlines())) <= 80


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
