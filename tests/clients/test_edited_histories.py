"""1,000 histories with one edit as clients make it, over HTTP, on PostgreSQL: each parent is found, and no other."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import Message, StoredTurn
from clawloop.core.ids import TurnId, turn_id_of
from clawloop.core.turns.canonical import text_parts
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from tests.contract.learning import POLICY
from tests.fakes.replies import Reply
from tests.ui.conftest import Page, page
from tests.unit.turns.test_places import EDITS, histories

__all__ = ["page"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CONVERSATIONS = 1_000
AT_ONCE = 8
MARK = re.compile(r"Conversation (\d+)\.")


def other_words(messages: list[Message], rng: random.Random) -> None:
    """The last reply says or does something else: it is not the one that was recorded."""
    reply = [message for message in messages if message["role"] == "assistant"][-1]
    calls: Any = reply.get("tool_calls")
    if calls:
        function = rng.choice(calls)["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]) | {"other": rng.random()})
    else:
        reply["content"] = f"{' '.join(text_parts(reply))} Or rather {rng.random()}."


def marked(history: list[Message], n: int) -> list[Message]:
    """The history as a conversation of its own."""
    messages = copy.deepcopy(history)
    first = next(message for message in messages if message["role"] == "user")
    said: Any = first["content"]
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
    first["content"] = [*parts, {"type": "text", "text": f"Conversation {n}."}]
    return messages


def reply_of(message: Mapping[str, Any]) -> Reply:
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in _calls(message)]
    return Reply("".join(text_parts(dict(message))), calls)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    return message.get("tool_calls") or []


def sayable(history: list[Message]) -> bool:
    """True if the engine can say each reply as it stands there."""
    try:
        replies = [reply_of(message) for message in history if message["role"] == "assistant"]
    except ValueError:
        return False
    return all(reply.text or reply.calls for reply in replies)


async def test_parents_of_a_thousand_edited_histories_over_http(page: Page) -> None:
    _, key = await PostgresKeyStore(page.learning.database).create_key(POLICY, {Scope.CHAT}, "client")
    turns = PostgresTurnStore(page.learning.database)
    captured = [history for history in histories() if sayable(history)]
    assert len(captured) >= 5
    said: dict[int, Reply] = {}

    def script(body: dict[str, Any]) -> Reply:
        mark = MARK.search(json.dumps(body["messages"]))
        assert mark is not None
        return said[int(mark[1])]

    page.engine.script = script
    slots = asyncio.Semaphore(AT_ONCE)
    results = Counter[tuple[str, str]]()
    wrong: list[str] = []

    async def conversation(client: httpx.AsyncClient, n: int) -> None:
        rng = random.Random(n)
        history = marked(captured[n % len(captured)], n)

        async def ask(messages: list[Message], reply: Reply) -> StoredTurn:
            said[n] = reply
            body = {"model": "policy", "messages": messages}
            answer = await client.post("/v1/chat/completions", json=body, headers={"X-Turn-Type": "main"})
            assert answer.status_code == 200, (n, answer.text)
            turn_id = turn_id_of(answer.json()["id"])
            assert turn_id is not None
            while (stored := await turns.load(turn_id)) is None:
                await asyncio.sleep(0.1)  # on a busy machine a turn may go through the spool
            return stored

        async with slots:
            replies: list[TurnId] = []
            for place, message in enumerate(history):
                if message["role"] == "assistant":
                    replies.append((await ask(history[:place], reply_of(message))).record.turn_id)
            edit = other_words if n % 5 == 4 else rng.choice(EDITS)
            edited = copy.deepcopy(history)
            edit(edited, rng)
            parent = (await ask(edited, Reply("Done."))).parent_turn_id
        if parent in replies[:-1] if edit is other_words else parent == replies[-1]:
            results[edit.__name__, "right"] += 1
        elif parent is None:
            results[edit.__name__, "none"] += 1
        else:
            wrong.append(f"conversation {n}, {edit.__name__}: {parent} of {replies}")

    async with (
        httpx.AsyncClient(base_url=page.url, headers={"Authorization": f"Bearer {key}"}, timeout=120) as client,
        asyncio.TaskGroup() as group,
    ):
        for n in range(CONVERSATIONS):
            group.create_task(conversation(client, n))
    assert wrong == [], results
    lost = {name: count for (name, what), count in results.items() if what == "none" and name != other_words.__name__}
    assert lost == {}, results
