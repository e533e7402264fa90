"""`POST /v1/feedback` and `GET /admin/v1/sessions`, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clawloop.contracts.sessions import FeedbackGiven
from clawloop.ids import new_turn_id, response_id, turn_id_of
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier


async def chat(gateway: Gateway, **fields: object) -> str:
    async with gateway.client() as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]} | fields
        answer = await client.post("/v1/chat/completions", json=body)
    response: str = answer.json()["id"]
    return response


async def give(gateway: Gateway, body: Any) -> tuple[int, dict[str, Any]]:
    async with gateway.client() as client:
        answer = await client.post("/v1/feedback", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("said", "score", "text"),
    [
        ({"rating": "up"}, 1.0, None),
        ({"rating": "down", "text": "Too long."}, -1.0, "Too long."),
        ({"score": -0.25}, -0.25, None),
        ({"score": 1}, 1.0, None),
        ({"text": "Merci !"}, None, "Merci !"),
    ],
)
async def test_feedback_is_taken_with_its_effect(
    gateway: Gateway, said: dict[str, Any], score: float | None, text: str | None
) -> None:
    reply = await chat(gateway)
    status, answer = await give(gateway, {"response_id": reply} | said)
    assert (status, answer["effect"]) == (202, "amends")
    assert gateway.sessions.given[-1] == (turn_id_of(reply), score, text)


async def test_feedback_by_session_and_turn(gateway: Gateway) -> None:
    replies = [await chat(gateway, session_id="mine") for _ in range(2)]
    status, _ = await give(gateway, {"session_id": "mine", "turn": 2, "rating": "up"})
    assert status == 202
    assert gateway.sessions.given[-1][0] == turn_id_of(replies[1])
    assert (await give(gateway, {"session_id": "mine", "turn": 3, "rating": "up"}))[0] == 404


async def test_the_outcome_of_a_sessions_task(gateway: Gateway) -> None:
    await chat(gateway, session_id="mine")
    status, answer = await give(gateway, {"session_id": "mine", "outcome": -1})
    assert (status, answer) == (202, {"session_id": "mine", "outcome": -1, "effect": "amends"})
    assert gateway.sessions.outcomes == [("mine", -1)]
    assert (await give(gateway, {"session_id": "other", "outcome": 1}))[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rating": "up"}, "response_id"),
        ({"response_id": "x", "session_id": "s", "turn": 1, "rating": "up"}, "response_id"),
        ({"session_id": "s", "rating": "up"}, "response_id"),
        ({"response_id": "x"}, "rating"),
        ({"response_id": "x", "rating": "up", "score": 1}, "score"),
        ({"response_id": "x", "rating": "sideways"}, "rating"),
        ({"response_id": "x", "score": 1.5}, "score"),
        ({"response_id": "x", "score": "1"}, "score"),
        ({"response_id": "x", "text": ""}, "text"),
        ({"response_id": "x", "rating": "up", "stars": 5}, "stars"),
        ({"outcome": 1}, "session_id"),
        ({"session_id": "s", "outcome": 0}, "outcome"),
        ({"session_id": "s", "outcome": True}, "outcome"),
        ({"session_id": "s", "outcome": "1"}, "outcome"),
        ({"session_id": "s", "turn": 1, "outcome": 1}, "outcome"),
        ({"session_id": "s", "rating": "up", "outcome": 1}, "outcome"),
        ({"response_id": "x", "outcome": -1}, "outcome"),
    ],
)
async def test_what_says_too_little_or_too_much_is_named(gateway: Gateway, body: dict[str, Any], field: str) -> None:
    status, answer = await give(gateway, body)
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize("unknown", [response_id(new_turn_id()), "chatcmpl-nonsense", "\0"])
async def test_a_reply_that_is_not_this_keys_is_not_found(gateway: Gateway, unknown: str) -> None:
    status, answer = await give(gateway, {"response_id": unknown, "rating": "up"})
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_feedback_is_announced(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], notifier=notifier) as gateway:
        _, answer = await give(gateway, {"response_id": await chat(gateway), "rating": "up"})
        async with asyncio.timeout(30):
            while not gateway.sessions.announced:
                await asyncio.sleep(0.01)
    assert isinstance(notifier.sent[-1][1], FeedbackGiven)
    assert str(notifier.sent[-1][1].feedback_id) == answer["feedback_id"]


async def test_sessions_are_listed_in_pages_and_shown_with_each_turns_why(gateway: Gateway) -> None:
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
