"""`POST /v1/feedback`, over HTTP, and reactions that clients pass on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.recording import notifier
from api.recording.notifier import NotificationQueue
from clawloop.app.cli.main import app
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.sessions import FeedbackGiven
from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.ids import new_turn_id, response_id, turn_id_of
from clawloop.core.telemetry.metrics import GatewayMetrics
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

# `POST /v1/feedback`, over HTTP.


async def give(
    gateway: Gateway, body: Any, once: str | None = None, key: str | None = None
) -> tuple[int, dict[str, Any]]:
    async with gateway.client(key) as client:
        headers = {} if once is None else {"Idempotency-Key": once}
        answer = await client.post("/v1/feedback", json=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("fields", "score", "text"),
    [
        ({"rating": "up"}, 1.0, None),
        ({"rating": "down", "text": "Too long."}, -1.0, "Too long."),
        ({"score": -0.25}, -0.25, None),
        ({"score": 1}, 1.0, None),
        ({"text": "Merci !"}, None, "Merci !"),
    ],
)
async def test_feedback_is_stored_and_its_effect_returned(
    gateway: Gateway, fields: dict[str, Any], score: float | None, text: str | None
) -> None:
    reply = await chat(gateway)
    status, answer = await give(gateway, {"response_id": reply} | fields)
    assert (status, answer["effect"]) == (202, "amends")
    assert gateway.sessions.given[-1] == (turn_id_of(reply), score, text)


async def test_feedback_by_session_and_turn(gateway: Gateway) -> None:
    replies = [await chat(gateway, session_id="mine") for _ in range(2)]
    status, _ = await give(gateway, {"session_id": "mine", "turn": 2, "rating": "up"})
    assert status == 202
    assert gateway.sessions.given[-1][0] == turn_id_of(replies[1])
    assert (await give(gateway, {"session_id": "mine", "turn": 3, "rating": "up"}))[0] == 404


async def test_feedback_on_the_last_reply(gateway: Gateway) -> None:
    await chat(gateway, session_id="first")
    newest = await chat(gateway, session_id="second")
    older = turn_id_of(await chat(gateway, session_id="first", turn_type="side"))
    assert (await give(gateway, {"turn": "last", "rating": "down"}))[0] == 202
    assert gateway.sessions.given[-1][0] == turn_id_of(newest)
    assert (await give(gateway, {"session_id": "first", "turn": "last", "rating": "up"}))[0] == 202
    assert gateway.sessions.given[-1][0] not in (turn_id_of(newest), older)
    assert (await give(gateway, {"session_id": "none", "turn": "last", "rating": "up"}))[0] == 404


@pytest.mark.parametrize("headers", [{}, {"X-Turn-Type": "side"}], ids=["next message", "heartbeat"])
async def test_a_reaction_that_openclaw_passes_on_rates_the_reply_before_it(
    gateway: Gateway, headers: dict[str, str]
) -> None:
    said: list[Any] = [{"role": "user", "content": "hello"}]
    async with gateway.client() as client:
        first = (await client.post("/v1/chat/completions", json={"model": "policy", "messages": said})).json()
        said += [first["choices"][0]["message"], {"role": "user", "content": "More."}]
        event = "System: [2026-11-23 12:54:48 UTC] Telegram reaction added: 👎 by Alice (@alice) on msg 42"
        frame = f'<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"{event}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
        again = {"model": "policy", "messages": [*said, {"role": "user", "content": frame}]}
        for _ in range(2):  # OpenClaw sends a request that failed again
            assert (await client.post("/v1/chat/completions", json=again, headers=headers)).status_code == 200
    rated = turn_id_of(first["id"])
    await until(lambda: any(turn == rated for turn, *_ in gateway.sessions.given))
    assert [given for given in gateway.sessions.given if given[0] == rated] == [(rated, -1.0, None)]


async def test_the_command_rates_the_last_reply(gateway: Gateway) -> None:
    reply = await chat(gateway)
    runner = CliRunner()
    address = ["--url", gateway.url, "--key", gateway.key]
    for said, given in (("up", (1.0, None)), ("down", (-1.0, None)), ("too long", (None, "too long"))):
        result = await asyncio.to_thread(runner.invoke, app, ["feedback", said, *address])
        assert (result.exit_code, result.output) == (0, "Saved; it changes this reply's verdict before training.\n")
        assert gateway.sessions.given[-1] == (turn_id_of(reply), *given)
    missing = await asyncio.to_thread(runner.invoke, app, ["feedback", "up", "--session", "none", *address])
    assert missing.exit_code == 1


async def test_the_command_says_how_a_task_ended(gateway: Gateway) -> None:
    await chat(gateway, session_id="told")
    run = ["feedback", "--outcome", "failed", "--url", gateway.url, "--key", gateway.key]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*run, "--session", "told"])
    assert (result.exit_code, result.output) == (0, "Saved; it changes the session's rewards before training.\n")
    assert gateway.sessions.outcomes.pop() == ("told", -1)
    for wrong in (run, [*run, "--session", "told", "--turn", "1"], ["feedback"]):
        assert (await asyncio.to_thread(CliRunner().invoke, app, wrong)).exit_code == 2, wrong


async def test_the_outcome_of_a_sessions_task(gateway: Gateway) -> None:
    await chat(gateway, session_id="mine")
    status, answer = await give(gateway, {"session_id": "mine", "outcome": -1})
    told = "Saved; it changes the session's rewards before training."
    assert (status, answer) == (202, {"session_id": "mine", "outcome": -1, "effect": "amends", "message": told})
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
async def test_a_missing_or_excess_field_is_named(gateway: Gateway, body: dict[str, Any], field: str) -> None:
    status, answer = await give(gateway, body)
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "unknown", [response_id(new_turn_id()), "chatcmpl-nonsense", "\0"], ids=["reply", "no id", "NUL"]
)
async def test_a_reply_of_another_key_is_not_found(gateway: Gateway, unknown: str) -> None:
    status, answer = await give(gateway, {"response_id": unknown, "rating": "up"})
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_feedback_is_notified(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], notifier=notifier) as gateway:
        _, answer = await give(gateway, {"response_id": await chat(gateway), "rating": "up"})
        await until(lambda: gateway.sessions.announced)
    assert isinstance(notifier.sent[-1][1], FeedbackGiven)
    assert str(notifier.sent[-1][1].feedback_id) == answer["feedback_id"]


async def test_feedback_is_read_back_by_its_own_key_alone(gateway: Gateway) -> None:
    reply = await chat(gateway, session_id="read back")
    await give(gateway, {"response_id": reply, "rating": "up", "text": "Good."})
    other = gateway.keys.add("default", {Scope.CHAT})
    async with gateway.client() as client, gateway.client(other) as stranger:
        for named in (f"response_id={reply}", "session_id=read+back&turn=1"):
            [given] = (await client.get(f"/v1/feedback?{named}")).json()["feedback"]
            assert (given["score"], given["text"], given["applied"]) == (1.0, "Good.", False)
        assert (await stranger.get("/v1/feedback", params={"response_id": reply})).status_code == 404
        assert (await client.get("/v1/feedback")).json()["error"]["param"] == "response_id"
        far = await client.get("/v1/feedback", params={"session_id": "read back", "turn": 10**19})
        assert far.status_code == 400


async def test_a_turn_beyond_all_numbers_is_refused(gateway: Gateway) -> None:
    await chat(gateway, session_id="far")
    status, body = await give(gateway, {"session_id": "far", "turn": 10**19, "rating": "up"})
    assert (status, body["error"]["param"]) == (400, "turn")


async def test_a_repeated_request_has_one_effect_and_the_first_answer(gateway: Gateway) -> None:
    reply = await chat(gateway, session_id="once")
    body = {"response_id": reply, "rating": "up", "text": "Good."}
    first = await give(gateway, body, "retry-1")
    assert first[0] == 202
    given, rows = len(gateway.sessions.given), len(gateway.sessions.feedback)
    assert await give(gateway, {"text": "Good.", "rating": "up", "response_id": reply}, "retry-1") == first
    assert (len(gateway.sessions.given), len(gateway.sessions.feedback)) == (given, rows)
    assert (await give(gateway, body, "retry-2"))[1]["feedback_id"] != first[1]["feedback_id"]
    assert (await give(gateway, body))[1]["feedback_id"] != first[1]["feedback_id"]


async def test_all_repetitions_at_once_have_one_effect(gateway: Gateway) -> None:
    reply = await chat(gateway)
    before = len(gateway.sessions.given)
    answers = await asyncio.gather(*(give(gateway, {"response_id": reply, "score": 0.5}, "at once") for _ in range(8)))
    assert [answer for answer in answers if answer != answers[0]] == []
    assert len(gateway.sessions.given) == before + 1


async def test_a_key_of_another_body_is_refused_and_changes_nothing(gateway: Gateway) -> None:
    reply = await chat(gateway, session_id="reused")
    await give(gateway, {"response_id": reply, "rating": "up"}, "reused-1")
    before = len(gateway.sessions.given)
    for other in (
        {"response_id": reply, "rating": "down"},
        {"response_id": reply, "rating": "up", "text": "more"},
        {"session_id": "reused", "outcome": 1},
    ):
        status, answer = await give(gateway, other, "reused-1")
        assert (status, answer["error"]["code"]) == (409, "idempotency_key_reused")
        assert answer["error"]["param"] == "Idempotency-Key"
    assert len(gateway.sessions.given) == before
    assert all(session != "reused" for session, _ in gateway.sessions.outcomes)


async def test_the_last_reply_stays_the_one_of_the_first_request(gateway: Gateway) -> None:
    older = await chat(gateway, session_id="moves on")
    body = {"session_id": "moves on", "turn": "last", "rating": "down"}
    first = await give(gateway, body, "last-1")
    await chat(gateway, session_id="moves on")
    assert await give(gateway, body, "last-1") == first
    assert gateway.sessions.given[-1][0] == turn_id_of(older)


async def test_an_outcome_may_be_repeated_and_does_not_undo_a_later_one(gateway: Gateway) -> None:
    await chat(gateway, session_id="task")
    first = await give(gateway, {"session_id": "task", "outcome": 1}, "outcome-1")
    await give(gateway, {"session_id": "task", "outcome": -1}, "outcome-2")
    assert await give(gateway, {"session_id": "task", "outcome": 1}, "outcome-1") == first
    assert [one for one in gateway.sessions.outcomes if one[0] == "task"] == [("task", 1), ("task", -1)]


async def test_keys_of_the_gateway_have_idempotency_keys_of_their_own(gateway: Gateway) -> None:
    reply = await chat(gateway)
    await give(gateway, {"response_id": reply, "rating": "up"}, "shared")
    other = gateway.keys.add("default", {Scope.CHAT})
    assert (await give(gateway, {"response_id": reply, "rating": "up"}, "shared", other))[0] == 404


async def test_a_refused_request_is_not_remembered(gateway: Gateway) -> None:
    refused = {"session_id": "comes later", "turn": 1, "rating": "up"}
    assert (await give(gateway, refused, "early"))[0] == 404
    await chat(gateway, session_id="comes later")
    assert (await give(gateway, refused, "early"))[0] == 202


@pytest.mark.parametrize("once", ["", "x" * 256])
async def test_an_unusable_idempotency_key_is_refused(gateway: Gateway, once: str) -> None:
    before = len(gateway.sessions.given)
    status, answer = await give(gateway, {"response_id": await chat(gateway), "rating": "up"}, once)
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")
    assert len(gateway.sessions.given) == before


async def test_two_idempotency_keys_are_none(gateway: Gateway) -> None:
    turn = await chat(gateway)
    async with gateway.client() as client:
        headers = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]
        refused = await client.post("/v1/feedback", json={"response_id": turn, "rating": "up"}, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "Idempotency-Key")


async def test_a_wrong_turn_is_named_as_the_client_spells_it(gateway: Gateway) -> None:
    async with gateway.client() as client:
        refused = await client.post("/v1/feedback", json={"turn": "third", "rating": "up"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "turn")


# Reactions that clients pass on are stored though a turn came late or PostgreSQL is away.

EVENT = "System: [2026-11-23 12:54:48 UTC] Telegram reaction added: 👎 by Alice (@alice) on msg 42"
FRAME = f'<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"{EVENT}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
NAMED = SessionEvidence(SessionSource.HEADER, "alice")


@dataclass
class Case:
    """
    Attributes:
        first: the turn whose reply is rated; second: the turn whose request holds the reaction.
    """

    turns: FakeTurnStore
    sessions: FakeSessionStore
    notifications: NotificationQueue
    first: TurnRecord
    second: TurnRecord

    def given(self) -> bool:
        return self.sessions.given == [(self.first.turn_id, -1.0, None)]


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(notifier, "RATING_PAUSES", (0.05,) * 100)
    turns = FakeTurnStore()
    sessions = FakeSessionStore(turns)
    said: list[Message] = [{"role": "user", "content": "hello"}]
    first = turn_record(messages=said, evidence=NAMED)
    assert first.response is not None
    said = [*said, first.response, {"role": "user", "content": FRAME}]
    second = turn_record(messages=said, evidence=NAMED)
    async with NotificationQueue(None, turns, sessions, GatewayMetrics()) as notifications:
        yield Case(turns, sessions, notifications, first, second)


async def test_of_a_turn_that_was_stored_already_though_it_went_by_the_disk(case: Case) -> None:
    await case.turns.insert(case.first)
    await case.turns.insert(case.second)  # nobody saw that it ended: the turn went to the disk meanwhile
    inserted = await case.turns.insert(case.second)
    assert inserted.duplicate
    case.notifications.add_turn(case.second, inserted)
    await until(case.given)
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    assert case.given()


async def test_on_a_reply_that_is_on_the_disk_yet(case: Case) -> None:
    inserted = await case.turns.insert(case.second)
    assert inserted.parent_turn_id is None
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    assert case.sessions.given == []
    await case.turns.insert(case.first)
    await until(case.given)


async def test_while_postgresql_is_away(case: Case) -> None:
    await case.turns.insert(case.first)
    inserted: InsertedTurn = await case.turns.insert(case.second)
    case.turns.available = False
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    case.turns.available = True
    await until(case.given)
