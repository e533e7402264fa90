"""A request that only looks like a client's chore is feedback once a later request holds it with its reply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawloop.core.contracts.turns import Message, TurnOutcome, TurnRecord
from clawloop.core.ids import new_turn_id
from tests.judging.conftest import Bench

pytestmark = pytest.mark.usefixtures("binary_bench")

CHORE = "Summarize our conversation so far in a few sentences."


CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "remember", "arguments": "{}"}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "c1", "content": "saved"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def with_tools(bench: Bench) -> list[TurnRecord]:
    """A reply, a chore that calls a tool, what goes on with the tool's result, and a person's next message."""
    first, chore = bench.conversation("Add in Python.", CHORE)
    chore = replace(chore, response=CALL)
    result = replace(first, turn_id=new_turn_id(), messages=[*chore.messages, CALL, RESULT])
    assert result.response is not None
    after = replace(first, turn_id=new_turn_id(), messages=[*result.messages, result.response, user("Now subtract.")])
    return [first, chore, result, after]


async def test_a_summary_that_a_client_asks_for_itself_is_no_feedback(bench: Bench) -> None:
    first, chore = bench.conversation("Add in Python.", CHORE)
    session = await bench.insert(first, chore)
    assert await bench.judge_turn(session, chore) == []
    summary = user("Summary of what was before: they added.")
    after = replace(first, turn_id=new_turn_id(), messages=[summary, user("Now subtract.")])
    await bench.insert(after)
    assert await bench.judge_turn(session, after) == []
    await bench.close(session)
    stored = await bench.turn(first.turn_id)
    assert (stored.outcome, stored.outcome_detail) == (TurnOutcome.NO_FEEDBACK, "looks like a summary request")
    assert bench.judge.requests == []


async def test_what_follows_the_turn_instead_is_its_feedback(bench: Bench) -> None:
    first, chore = bench.conversation("Add in Python.", CHORE)
    _, after = bench.conversation("Add in Python.", "That was wrong.")
    session = await bench.insert(first, chore, after)
    (result,) = await bench.judge_turn(session, after)
    assert result.turn_id == first.turn_id
    assert all("That was wrong." in str(request) for request in bench.judge.requests)


async def test_a_person_who_asks_for_a_summary_gives_feedback(bench: Bench) -> None:
    first, asked, after = bench.conversation("Add in Python.", CHORE, "Thanks.")
    session = await bench.insert(first, asked)
    assert await bench.judge_turn(session, asked) == []
    await bench.insert(after)
    results = await bench.judge_turn(session, after)
    assert {result.turn_id for result in results} == {first.turn_id, asked.turn_id}


async def test_a_summary_kept_as_an_assistants_message_is_still_a_chore(bench: Bench) -> None:
    first, chore = bench.conversation("Add in Python.", CHORE)
    session = await bench.insert(first, chore)
    assert chore.response is not None
    kept = [user("Go on from this."), chore.response, user("Now subtract.")]
    after = replace(first, turn_id=new_turn_id(), messages=kept)
    await bench.insert(after)
    assert await bench.judge_turn(session, after) == []
    await bench.close(session)
    for turn in (first, chore):
        assert (await bench.turn(turn.turn_id)).outcome_detail == "looks like a summary request"


async def test_a_chore_that_goes_on_with_tools_is_no_feedback(bench: Bench) -> None:
    first, chore, result, _ = with_tools(bench)
    session = await bench.insert(first, chore, result)
    assert await bench.judge_turn(session, chore) == []
    assert {judged.turn_id for judged in await bench.judge_turn(session, result)} == {chore.turn_id}
    await bench.close(session)
    stored = await bench.turn(first.turn_id)
    assert (stored.outcome, stored.outcome_detail) == (TurnOutcome.NO_FEEDBACK, "looks like a summary request")


async def test_a_person_who_goes_on_after_the_tools_gave_feedback(bench: Bench) -> None:
    first, chore, result, after = with_tools(bench)
    session = await bench.insert(first, chore, result, after)
    results = await bench.judge_turn(session, after)
    assert {judged.turn_id for judged in results} == {first.turn_id, result.turn_id}
