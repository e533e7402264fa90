"""`GET /admin/v1/sessions`, over HTTP."""

from __future__ import annotations

from clawloop.core.ids import new_turn_id
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway


async def test_sessions_are_listed_in_pages_and_shown_with_the_reason_for_each_outcome(gateway: Gateway) -> None:
    for name in ("a", "b", "c"):
        await chat(gateway, session_id=name)
    await chat(gateway, session_id="c", turn_type="side")
    async with gateway.client(gateway.admin_key) as client:
        first = (await client.get("/admin/v1/sessions", params={"limit": 2})).json()
        rest = (await client.get("/admin/v1/sessions", params={"limit": 2, "after": first["next"]})).json()
        names = [session["external_id"] for session in first["sessions"] + rest["sessions"]]
        assert (names, rest["next"]) == (["c", "b", "a"], None)
        shown = (await client.get(f"/admin/v1/sessions/{first['sessions'][0]['id']}")).json()
        assert [(turn["kind"], turn["outcome"]) for turn in shown["turns"]] == [("main", "waiting"), ("side", "side")]
        assert shown["turns"][1]["why"] == "body turn_type: side"
        missing = await client.get(f"/admin/v1/sessions/{new_turn_id()}")
        assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
        assert (await client.get("/admin/v1/sessions", params={"state": "bored"})).status_code == 400


async def test_sessions_need_an_admin_key(gateway: Gateway) -> None:
    async with gateway.client() as client:
        assert (await client.get("/admin/v1/sessions")).status_code == 403
