"""`/admin/v1/engines`, `/keys`, `/check` and single turns, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from clawloop.core.contracts.serving import Scope
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway


async def test_turns_are_shown_by_reply_by_beginning_and_by_number(gateway: Gateway) -> None:
    reply = await chat(gateway, session_id="mine")
    async with gateway.client(gateway.admin_key) as client:
        whole = (await client.get(f"/admin/v1/turns/{reply}")).json()
        assert (whole["turn"]["response_id"], whole["tokens"]) == (reply, None)
        assert whole["messages"][0]["role"] == "user"
        assert whole["response"]["role"] == "assistant"
        for reference in (whole["turn"]["short_id"], "mine:1", "last"):
            why = (await client.get(f"/admin/v1/turns/{reference}/why")).json()
            assert why == whole["turn"]
        tokens = (await client.get(f"/admin/v1/turns/{reply}", params={"tokens": "true"})).json()["tokens"]
        assert len(tokens["response_ids"]) == len(tokens["logprobs"])
        session = (await client.get("/admin/v1/sessions/mine", params={"content": "true"})).json()
        [exchange] = session["conversation"]
        assert exchange["reply"] == whole["response"]
        assert session["session"]["workflow_id"] == f"session/{session['session']['id']}"


async def test_the_beginning_of_several_ids_is_400(gateway: Gateway) -> None:
    replies = [await chat(gateway, session_id="several") for _ in range(2)]
    beginning = replies[0].removeprefix("chatcmpl-")[:8]
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.get(f"/admin/v1/turns/{beginning}/why")
        assert (answer.status_code, answer.json()["code"]) == (400, "ambiguous_id")
        assert (await client.get("/admin/v1/turns/nobody")).status_code == 404


async def test_keys_are_made_listed_and_ended(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        made = await client.post("/admin/v1/keys", json={"scopes": ["admin"], "name": "laptop"})
        assert made.status_code == 201
        new = made.json()
        async with gateway.client(new["key"]) as other:
            listed = (await other.get("/admin/v1/keys")).json()["keys"]
        assert [key["name"] for key in listed if key["prefix"] == new["prefix"]] == ["laptop"]
        assert not any("key" in key for key in listed)
        ended = await client.delete(f"/admin/v1/keys/{new['prefix'][:9]}")
        assert ended.json() == {"prefix": new["prefix"]}
        assert (await client.delete("/admin/v1/keys/laptop")).status_code == 404
        assert (await client.post("/admin/v1/keys")).json()["scopes"] == ["chat"]
        assert (await client.post("/admin/v1/keys", json={"scopes": ["root"]})).status_code == 400


async def test_a_key_ends_after_the_days_it_was_made_for(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        new = (await client.post("/admin/v1/keys", json={"name": "guest", "days": 7})).json()
        left = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
        assert timedelta(days=6) < left <= timedelta(days=7)
        listed = {key["prefix"]: key["expires_at"] for key in (await client.get("/admin/v1/keys")).json()["keys"]}
        assert listed[new["prefix"]] == new["expires_at"]
        use = (await client.get(f"/admin/v1/keys/{new['prefix']}/limits")).json()
        assert use["expires_at"] == new["expires_at"]
        for wrong in (0, -1, 36_501, "7", True):
            assert (await client.post("/admin/v1/keys", json={"days": wrong})).status_code == 400
    ended = gateway.keys.add("default", {Scope.CHAT}, "ended", datetime.now(UTC))
    async with gateway.client(new["key"]) as guest, gateway.client(ended) as late:
        assert (await guest.get("/v1/models")).status_code == 200
        refused = await late.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_engines_are_added_drained_and_removed(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        only = await client.post("/admin/v1/engines/e0/drain")
        assert (only.status_code, only.json()["code"]) == (409, "last_engine")
        added = (await client.post("/admin/v1/engines", json={"url": "http://127.0.0.1:1"})).json()
        assert (added["engine"]["healthy"], len(added["warnings"])) == (False, 1)
        refused = await client.post("/admin/v1/engines", json={"url": "http://127.0.0.1:2", "require_guard": True})
        assert (refused.status_code, refused.json()["field"]) == (400, "url")
        assert (await client.post("/admin/v1/engines", json={"url": "ftp://x"})).status_code == 400
        drained = (await client.post("/admin/v1/engines/e0/drain", json={})).json()
        assert (drained["id"], drained["draining"], drained["healthy"]) == ("e0", True, True)
        assert (await client.delete("/admin/v1/engines/127")).status_code == 409
        assert (await client.delete("/admin/v1/engines/127", params={"force": "true"})).status_code == 204
        listed = (await client.get("/admin/v1/engines")).json()["engines"]
        assert [engine["id"] for engine in listed] == ["e0"]


async def test_the_ledger_is_checked(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        report = (await client.get("/admin/v1/check")).json()
        assert (report["violations"], report["adapters"]) == ([], 0)
        report = (await client.get("/admin/v1/check", params={"files": "true"})).json()
        assert report["violations"] == [{"invariant": "files", "row": "v1"}]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/turns/last"),
        ("GET", "/turns/last/why"),
        ("GET", "/keys"),
        ("POST", "/keys"),
        ("DELETE", "/keys/cl"),
        ("POST", "/engines"),
        ("POST", "/engines/e0/drain"),
        ("DELETE", "/engines/e0"),
        ("GET", "/check"),
    ],
)
async def test_a_chat_key_is_no_operators(gateway: Gateway, method: str, path: str) -> None:
    async with gateway.client() as client:
        assert (await client.request(method, f"/admin/v1{path}")).status_code == 403


async def test_a_key_is_replaced_while_chats_go_on(fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/security.md says: make, change over, revoke; a request with either key is answered meanwhile."""
    old = fresh_gateway.keys.add("default", {Scope.CHAT}, "phone-1")
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    async with fresh_gateway.client(fresh_gateway.admin_key) as admin, fresh_gateway.client(old) as before:
        assert (await before.post("/v1/chat/completions", json=body)).status_code == 200
        new = (await admin.post("/admin/v1/keys", json={"name": "phone-2"})).json()["key"]
        async with fresh_gateway.client(new) as after:
            answers = [await client.post("/v1/chat/completions", json=body) for client in (before, after)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert (await admin.delete("/admin/v1/keys/phone-1")).status_code == 200
            monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)  # as if 30 s had passed
            assert (await before.post("/v1/chat/completions", json=body)).status_code == 401
            assert (await after.post("/v1/chat/completions", json=body)).status_code == 200


async def test_the_status_names_what_is_wrong(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        status = (await client.get("/admin/v1/status")).json()
        assert (status["engines"], status["engines_answering"], status["problems"]) == (1, 1, [])
        assert [policy["policy"] for policy in status["policies"]] == ["default"]
        await client.post("/admin/v1/engines/e0/drain", json={"force": True})
        await client.post("/admin/v1/training/pause", json={"reason": "holiday"})
        status = (await client.get("/admin/v1/status")).json()
    assert status["problems"] == [
        "every engine is drained: `clawloop engine drain --undo e0`",
        "training of default is paused: holiday",
    ]
