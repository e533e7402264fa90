"""Lessons in prompts over HTTP, and their admin routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawloop.core.contracts.lessons import PolicyLessons
from clawloop.core.contracts.serving import Policy, Scope
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.families.orders import Rule
from clawloop.core.ids import LessonId, new_lesson_id
from clawloop.core.lessons.prompt import LEAD_IN, turn_as_sent
from db.serving.directory import DEFAULT_SAMPLING
from tests.api.conftest import Gateway, running_gateway, until
from tests.engines.test_served_model import template
from tests.fakes.engine import fake_engine

CHAT = "/v1/chat/completions"
PATH = "/admin/v1/policies/default/lessons"
ASKED = [{"role": "user", "content": "How late is it?"}]
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@pytest.fixture(params=["qwen2_5"])
async def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine:
        engine.template = template(request.param)
        async with running_gateway(tmp_path, engines=[engine]) as running:
            yield running


async def teach(gateway: Gateway, *texts: str, policy: str = "default") -> list[LessonId]:
    """Have gateways know these lessons, as they read them from the directory."""
    known = {new_lesson_id(): text for text in texts}
    gateway.directory.set_lessons(PolicyLessons(tuple(known), known), policy)
    await gateway.services.directory.refresh()
    return list(known)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **headers: str) -> httpx.Response:
    answer = await client.post(CHAT, json={"model": "policy", "messages": messages}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def block(*texts: str) -> str:
    return "\n".join((LEAD_IN, *(f"- {text}" for text in texts)))


async def test_lessons_end_the_system_message_and_are_recorded_beside_the_client_s_own_messages(
    gateway: Gateway,
) -> None:
    one, other = await teach(gateway, "Be short.", "Use no lists.")
    async with gateway.client() as client:
        answer = await ask(client, [{"role": "system", "content": "You are a clock."}, *ASKED])
    system, user = gateway.engine.requests[-1]["messages"]
    assert system["content"] == f"You are a clock.\n\n{block('Be short.', 'Use no lists.')}"
    assert user == ASKED[0]
    assert answer.headers["x-clawloop-lessons"] == f"{one}, {other}"
    (record,) = await gateway.recorded()
    assert record.messages == [{"role": "system", "content": "You are a clock."}, *ASKED]
    assert [lesson.text for lesson in record.lessons] == ["Be short.", "Use no lists."]


@pytest.mark.parametrize("gateway", ["qwen2_5", "qwen3", "strict"], indirect=True)
async def test_whatever_renders_the_turn_anew_gets_what_the_engine_got(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    async with gateway.client() as client:
        await ask(client, ASKED)
        await ask(client, [{"role": "developer", "content": "You are a clock."}, *ASKED, *ASKED])
    for record, sent in zip(await gateway.recorded(2), gateway.engine.requests, strict=True):
        assert list(turn_as_sent(record, record.messages)) == sent["messages"]


async def test_without_a_system_message_the_template_s_own_text_comes_first(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    async with gateway.client() as client:
        await ask(client, ASKED)
    system, _ = gateway.engine.requests[-1]["messages"]
    assert system == {"role": "system", "content": f"{QWEN}\n\n{block('Be short.')}"}


@pytest.mark.parametrize("gateway", ["strict"], indirect=True)
async def test_a_template_without_such_roles_gets_lessons_in_an_order_that_it_takes(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    async with gateway.client() as client:
        await ask(client, [{"role": "developer", "content": "You are a clock."}, *ASKED])
    assert block("Be short.") in str(gateway.engine.prompts[-1])
    (record,) = await gateway.recorded()
    assert Rule.DEVELOPER in (record.sampling.get("sent_by") or [])  # type: ignore[operator]


async def test_a_session_keeps_its_lessons_and_a_compaction_takes_the_new_ones(gateway: Gateway) -> None:
    (old,) = await teach(gateway, "Old.")
    async with gateway.client() as client:
        first = await ask(client, ASKED)
        said = [*ASKED, first.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        (new,) = await teach(gateway, "New.")
        gone = await ask(client, said)
        assert "x-clawloop-lessons" not in gone.headers  # the old one was erased: it is in no prompt any more
        known = {old: "Old.", new: "New."}
        gateway.directory.set_lessons(PolicyLessons((new,), known))
        await gateway.services.directory.refresh()
        kept = await ask(client, [*ASKED, first.json()["choices"][0]["message"], {"role": "user", "content": "So?"}])
        assert kept.headers["x-clawloop-lessons"] == str(old)
        begun = await ask(client, [{"role": "user", "content": "Something else."}])
        assert begun.headers["x-clawloop-lessons"] == str(new)
        compacted = await ask(client, [{"role": "user", "content": "Summary: it was late."}, *said[1:]])
        assert compacted.headers["x-clawloop-lessons"] == str(new)


async def test_another_gateway_finds_a_session_s_lessons_in_postgresql(gateway: Gateway) -> None:
    (old,) = await teach(gateway, "Old.")
    async with gateway.client() as client:
        first = await ask(client, ASKED)
        said = [*ASKED, first.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        gateway.directory.set_lessons(PolicyLessons((), {old: "Old."}))
        await gateway.services.directory.refresh()
        gateway.services.lessons._recent.clear()
        assert (await ask(client, said)).headers["x-clawloop-lessons"] == str(old)
        gateway.services.lessons._recent.clear()
        gateway.turns.available = False
        assert "x-clawloop-lessons" not in (await ask(client, said)).headers  # answered all the same
        gateway.turns.available = True


async def test_without_postgresql_a_session_gets_no_lessons_that_it_did_not_begin_with(gateway: Gateway) -> None:
    (lesson,) = await teach(gateway, "Be short.")
    async with gateway.client() as client:
        first = await ask(client, ASKED, **{"X-Clawloop-Lessons": "off"})
        said = [*ASKED, first.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        gateway.services.lessons._recent.clear()
        gateway.turns.available = False
        for _ in range(2):  # the second without a look-up
            assert "x-clawloop-lessons" not in (await ask(client, said)).headers
            gateway.services.lessons._recent.clear()
        assert (await ask(client, ASKED)).headers["x-clawloop-lessons"] == str(lesson)  # it begins
        gateway.turns.available = True


async def test_no_side_turn_and_no_request_that_wants_none_gets_lessons(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    async with gateway.client() as client:
        for headers in ({"X-Turn-Type": "side"}, {"X-Clawloop-Lessons": "off"}, {"X-Clawloop-Lessons": "OFF"}):
            answer = await ask(client, ASKED, **headers)
            assert "x-clawloop-lessons" not in answer.headers
            assert gateway.engine.requests[-1]["messages"] == ASKED
        refused = await client.post(
            CHAT, json={"model": "policy", "messages": ASKED}, headers={"X-Clawloop-Lessons": "maybe"}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "X-Clawloop-Lessons"
    records = await gateway.recorded(3)
    assert [record.kind for record in records] == [TurnKind.SIDE, TurnKind.MAIN, TurnKind.MAIN]
    assert not any(record.lessons for record in records)


async def test_no_request_of_an_episode_gets_lessons(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    _, secret = gateway.keys.add_episode("default", datetime.now(UTC) + timedelta(hours=1))
    async with gateway.client(secret) as client:
        assert "x-clawloop-lessons" not in (await ask(client, ASKED)).headers
    assert gateway.engine.requests[-1]["messages"] == ASKED
    (record,) = await gateway.recorded()
    assert (record.kind, record.lessons) == (TurnKind.MAIN, ())


async def test_two_policies_with_opposite_lessons_never_get_each_other_s(gateway: Gateway) -> None:
    gateway.directory.add_policy(Policy("other", "tiny", (), 0, dict(DEFAULT_SAMPLING)), frozenset())
    wishes = {"default": "Answer in one word.", "other": "Answer at length."}
    (short,) = await teach(gateway, wishes["default"])
    (long,) = await teach(gateway, wishes["other"], policy="other")
    async with gateway.client() as one, gateway.client(gateway.keys.add("other", {Scope.CHAT})) as other:
        chats = [(one, short, wishes["default"], [*ASKED]), (other, long, wishes["other"], [*ASKED])]
        for turn in range(3):
            if turn == 2:
                gateway.services.lessons._recent.clear()  # as if another gateway answered
            for client, lesson, wish, messages in chats:
                answer = await ask(client, messages)
                assert answer.headers["x-clawloop-lessons"] == str(lesson)
                system, *sent = gateway.engine.requests[-1]["messages"]
                assert (system["content"], sent) == (f"{QWEN}\n\n{block(wish)}", messages)
                said = answer.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
            chats.reverse()
    assert len(gateway.engine.requests) == 6


async def test_a_conversation_is_found_again_with_and_without_lessons(gateway: Gateway) -> None:
    await teach(gateway, "Be short.")
    async with gateway.client() as client:
        first = await ask(client, ASKED)
        gateway.directory.set_lessons(None)
        await gateway.services.directory.refresh()
        said = [*ASKED, first.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        second = await ask(client, said)
    assert second.headers["x-clawloop-session"]
    before, after = await gateway.recorded(2)
    await until(lambda: gateway.turns.matched)
    stored = await gateway.turns.load(after.turn_id)
    assert stored is not None
    assert stored.parent_turn_id == before.turn_id


# Admin routes ---------------------------------------------------------------------------------------------------------


async def test_lessons_are_typed_turned_off_and_on_replaced_and_forgotten(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        added = await client.post(PATH, json={"text": " Answer in\none sentence. "})
        assert added.status_code == 201
        lesson = added.json()
        assert (lesson["text"], lesson["state"], lesson["source"]) == ("Answer in one sentence.", "active", "typed")
        assert (await client.get(PATH)).json() == {
            "policy": "default",
            "enabled": False,
            "max_tokens": 400,
            "left_out": 0,
            "lessons": [lesson],
        }
        short = lesson["short_id"]
        assert (await client.post(f"{PATH}/{short}/off")).json()["state"] == "off"
        assert (await client.post(f"{PATH}/{short}/on")).json()["why"] == "turned on"
        other = await client.post(PATH, json={"text": "Answer in two sentences.", "instead_of": lesson["id"]})
        listed = (await client.get(PATH)).json()["lessons"]
        assert [one["state"] for one in listed] == ["superseded", "active"]
        assert listed[0]["superseded_by"] == other.json()["id"]
        assert (await client.delete(f"{PATH}/{lesson['id']}")).json() == {
            "id": lesson["id"],
            "turns": 0,
            "versions": [],
            "roll_back_to": None,
        }
        again = await client.delete(f"{PATH}/{lesson['id']}")
        assert (again.status_code, again.json()["code"]) == (404, "lesson_not_found")
        assert len((await client.get(PATH)).json()["lessons"]) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("x" * 10_000, "has 10000 characters"),
        ("Ring\x07.", "control characters"),
        ("<|im_end|>", "control tokens"),
    ],
)
async def test_what_is_no_lesson_is_refused(gateway: Gateway, text: str, problem: str) -> None:
    async with gateway.client(gateway.admin_key) as client:
        refused = await client.post(PATH, json={"text": text})
        assert refused.status_code == 400
        assert problem in refused.json()["detail"]
        assert refused.json()["field"] == "text"
        assert (await client.get(PATH)).json()["lessons"] == []


async def test_a_chat_key_reads_no_lessons(gateway: Gateway) -> None:
    async with gateway.client() as client:
        assert (await client.get(PATH)).status_code == 403
        assert (await client.post(PATH, json={"text": "Be short."})).status_code == 403
