"""Replies that a client began, in memory and in PostgreSQL: the next request has both parts as one message."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource
from tests.contract.conftest import Stores
from tests.records import turn_record

SAMPLING: dict[str, JsonValue] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
GOES_ON: dict[str, JsonValue] = SAMPLING | {"continue_final_message": True}
ASKED: Message = {"role": "user", "content": "Name a colour."}


@pytest.mark.parametrize(
    "begun", ["The colour is: ", [{"type": "text", "text": "The colour is: "}]], ids=["text", "parts"]
)
async def test_the_next_request_follows_a_reply_that_its_client_began(stores: Stores, begun: JsonValue) -> None:
    messages: list[Message] = [ASKED, {"role": "assistant", "content": begun}]
    evidence = SessionEvidence(SessionSource.CONVERSATION, None)
    first = turn_record(
        api_key_id=stores.key,
        evidence=evidence,
        messages=messages,
        response={"role": "assistant", "content": "red."},
        sampling=GOES_ON,
    )
    said: Message = {"role": "assistant", "content": "The colour is: red."}
    second = turn_record(
        api_key_id=stores.key, evidence=evidence, messages=[ASKED, said, {"role": "user", "content": "Another."}]
    )
    one, two = await stores.turns.insert(first), await stores.turns.insert(second)
    assert two.session_id == one.session_id
    assert two.parent_turn_id == first.turn_id
    stored = await stores.turns.load(second.turn_id)
    assert stored is not None
    assert stored.record.messages == second.messages
    assert await stores.turns.version_of_parent(stores.key, evidence, second.messages) == first.version


async def test_without_the_setting_an_assistants_last_message_is_one_of_its_own(stores: Stores) -> None:
    messages: list[Message] = [ASKED, {"role": "assistant", "content": "Red."}]
    evidence = SessionEvidence(SessionSource.HEADER, "s")
    first = turn_record(
        api_key_id=stores.key,
        evidence=evidence,
        messages=messages,
        response={"role": "assistant", "content": "Or blue."},
        sampling=SAMPLING,
    )
    joined: list[Message] = [ASKED, {"role": "assistant", "content": "Red.Or blue."}, ASKED]
    apart: list[Message] = [*messages, {"role": "assistant", "content": "Or blue."}, ASKED]
    await stores.turns.insert(first)
    parents = []
    for following in (joined, apart):
        turn = turn_record(api_key_id=stores.key, evidence=evidence, messages=following)
        parents.append((await stores.turns.insert(turn)).parent_turn_id)
    assert parents == [None, first.turn_id]
