"""`X-Clawloop-Policy`: a key that may chooses the policy of a request, and no header moves a session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawloop.core.contracts.serving import Policy, Scope
from clawloop.core.contracts.turns import StoredTurn
from tests.api.chat_requests import PATH, TEXT, chat_body
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import FakeEngine

ANNA = {"X-Clawloop-Policy": "anna"}
RESPONSES = "/v1/responses"


@pytest.fixture
async def two_policies(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with the policies `default`, at version 0, and `anna`, whose version 3 is active."""
    async with running_gateway(tmp_path, engines=[engine]) as running:
        running.directory.add_policy(Policy("anna", "tiny", ("annas-model",), 3, {}), frozenset({3}))
        await running.services.directory.refresh()
        yield running


def key_for(gateway: Gateway, *policies: str) -> str:
    return gateway.keys.add("default", {Scope.CHAT}, policies=policies)


async def post(
    client: httpx.AsyncClient, path: str = PATH, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = chat_body(**fields) if path == PATH else {"model": "policy", **fields}
    return await client.post(path, json=body, headers=headers or {})


async def stored(gateway: Gateway, count: int) -> list[StoredTurn]:
    turns = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(count)]
    return [turn for turn in turns if turn is not None]


@pytest.mark.parametrize("policies", [("anna",), ("*",), ("other", "anna")])
async def test_the_chosen_policy_answers_and_is_recorded(two_policies: Gateway, policies: tuple[str, ...]) -> None:
    async with two_policies.client(key_for(two_policies, *policies)) as client:
        own, chosen = await post(client), await post(client, headers=ANNA)
    assert [answer.headers["x-clawloop-version"] for answer in (own, chosen)] == ["0", "3"]
    assert [request["model"] for request in two_policies.engine.requests] == ["tiny", "anna-v3"]
    turns = await two_policies.recorded(2)
    assert [(turn.policy, turn.version, turn.evidence.policy) for turn in turns] == [
        ("default", 0, None),
        ("anna", 3, "anna"),
    ]


@pytest.mark.parametrize("named", [True, False], ids=["named session", "conversation"])
async def test_a_header_never_moves_a_session(two_policies: Gateway, named: bool) -> None:
    session = {"X-Session-Id": "s"} if named else {}
    said: list[Any] = [{"role": "user", "content": "hello"}]
    again = [*said, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "More."}]
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        for messages in (said, again):
            for headers in ({}, ANNA):
                assert (await post(client, headers=session | headers, messages=messages)).status_code == 200
    own, chosen, own_next, chosen_next = await stored(two_policies, 4)
    assert own.session_id != chosen.session_id
    assert [turn.session_id for turn in (own_next, chosen_next)] == [own.session_id, chosen.session_id]
    assert [turn.parent_turn_id for turn in (own_next, chosen_next)] == [own.record.turn_id, chosen.record.turn_id]


async def test_the_keys_own_policy_named_by_header_is_the_same_session(two_policies: Gateway) -> None:
    async with two_policies.client() as client:
        for headers in ({}, {"X-Clawloop-Policy": "default"}, {"X-Clawloop-Policy": ""}):
            assert (await post(client, headers={"X-Session-Id": "s"} | headers)).status_code == 200
    assert len({turn.session_id for turn in await stored(two_policies, 3)}) == 1


async def test_a_response_goes_on_in_a_session_of_the_chosen_policy(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        first = (await post(client, RESPONSES, ANNA, input="hello")).json()["id"]
        for headers in (ANNA, {}):
            answer = await post(client, RESPONSES, headers, previous_response_id=first, input="and now?")
            assert answer.status_code == 200
    begun, same, other = await stored(two_policies, 3)
    assert (same.session_id, same.parent_turn_id) == (begun.session_id, begun.record.turn_id)
    assert other.session_id != begun.session_id
    assert (other.record.policy, other.parent_turn_id) == ("default", None)
    assert other.record.messages[:2] == same.record.messages[:2]


async def test_feedback_by_a_sessions_name_is_on_the_policys(two_policies: Gateway) -> None:
    key = key_for(two_policies, "anna")
    async with two_policies.client(key) as client:
        for headers in ({}, ANNA):
            await post(client, headers={"X-Session-Id": "s"} | headers)
        own, chosen = [turn.turn_id for turn in await two_policies.recorded(2)]
        last, named = {"turn": "last", "rating": "up"}, {"session_id": "s", "turn": 1, "rating": "up"}
        for body in (last, named):
            for headers, rated in (({}, own), (ANNA, chosen)):
                answer = await client.post("/v1/feedback", json=body, headers=headers)
                assert (answer.status_code, two_policies.sessions.given[-1][0]) == (202, rated), (body, headers)
        once = {"Idempotency-Key": "one"}
        assert (await client.post("/v1/feedback", json=last, headers=once)).status_code == 202
        other = await client.post("/v1/feedback", json=last, headers=once | ANNA)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


@pytest.mark.parametrize("path", [PATH, RESPONSES, "/v1/messages", "/v1/completions"])
async def test_a_key_that_may_not_choose_is_refused_with_the_remedy(two_policies: Gateway, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        PATH: {},
        RESPONSES: {"input": "hello"},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
        "/v1/completions": {"prompt": "hello"},
    }
    async with two_policies.client() as client:
        refused = await post(client, path, ANNA, **bodies[path])
    assert refused.status_code == 403
    assert "`X-Clawloop-Policy`: this key may not choose the policy 'anna'" in refused.json()["error"]["message"]
    assert "clawloop key create --policies" in refused.json()["error"]["message"]
    if path != "/v1/messages":
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("policy_not_allowed", "X-Clawloop-Policy")
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        answer = await post(client, path, ANNA | {"anthropic-version": "2023-06-01"}, **bodies[path])
    assert (answer.status_code, answer.headers["x-clawloop-version"]) == (200, "3")


async def test_a_policy_that_is_not_there_is_not_found(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "*")) as client:
        missing = await post(client, headers={"X-Clawloop-Policy": "nobody"})
        models = await client.get("/v1/models", headers={"X-Clawloop-Policy": "nobody"})
    assert (missing.status_code, models.status_code) == (404, 404)
    error = missing.json()["error"]
    assert (error["code"], error["param"]) == ("policy_not_found", "X-Clawloop-Policy")
    assert two_policies.engine.requests == []


async def test_the_models_are_those_of_the_chosen_policy(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        answer = await client.get("/v1/models", params={"versions": True}, headers=ANNA)
        names = [model["id"] for model in answer.json()["data"]]
        assert names == ["policy", "annas-model", "policy-side", "annas-model-side", "tiny", "anna-v3"]
        assert (await client.get("/v1/models/anna-v3", headers=ANNA)).status_code == 200
        assert (await client.get("/v1/models/anna-v3")).status_code == 404


async def test_a_turn_waits_in_the_spool_with_the_chosen_policy(two_policies: Gateway) -> None:
    two_policies.turns.available = False
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        assert (await post(client, headers=ANNA | {"X-Session-Id": "s"})).status_code == 200
        two_policies.turns.available = True
        (turn,) = await stored(two_policies, 1)
        assert (await post(client, headers=ANNA | {"X-Session-Id": "s"})).status_code == 200
    assert (turn.record.policy, turn.record.evidence.policy) == ("anna", "anna")
    assert len({one.session_id for one in await stored(two_policies, 2)}) == 1


async def test_a_tools_result_goes_to_the_version_of_its_policy(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[engine], active=4, versions=frozenset({4})) as gateway:
        gateway.directory.add_policy(Policy("anna", "tiny", (), 3, {}), frozenset({3}))
        await gateway.services.directory.refresh()
        said: list[Any] = [{"role": "user", "content": "TOOL"}]
        async with gateway.client(key_for(gateway, "anna")) as client:
            reply = (await post(client, messages=said)).json()["choices"][0]["message"]
            await post(client, headers=ANNA, messages=said)
            call = reply["tool_calls"][0]["id"]
            said += [reply, {"role": "tool", "tool_call_id": call, "content": "a.txt"}]
            versions = [
                (await post(client, headers=headers, messages=said)).headers["x-clawloop-version"]
                for headers in ({}, ANNA)
            ]
    assert versions == ["4", "3"]
