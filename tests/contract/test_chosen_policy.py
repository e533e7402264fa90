"""Turns of one key under a policy that a header chose, on the fake and on PostgreSQL."""

from __future__ import annotations

import pytest

from clawloop.core.contracts.turns import InsertedTurn, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from tests.chats import assistant, user
from tests.contract.conftest import Stores
from tests.records import turn_record

POLICIES = ("default", "anna")


def asked(stores: Stores, policy: str, name: str | None, *before: str) -> TurnRecord:
    source = SessionSource.CONVERSATION if name is None else SessionSource.HEADER
    chosen = None if policy == "default" else policy
    messages = [message for text in before for message in (user(text), assistant("hello"))]
    return turn_record(
        api_key_id=stores.key,
        policy=policy,
        evidence=SessionEvidence(source, name, policy=chosen),
        messages=[*messages, user("next" if before else "one")],
    )


@pytest.fixture
async def both(stores: Stores) -> Stores:
    """Stores with the policies `default`, which is the keys' own, and `anna`."""
    await stores.add_policy("anna")
    return stores


@pytest.mark.parametrize("name", ["s", None], ids=["named session", "conversation"])
async def test_the_same_conversation_is_a_session_of_each_policy(both: Stores, name: str | None) -> None:
    first = {policy: asked(both, policy, name) for policy in POLICIES}
    begun = {policy: await both.turns.insert(turn) for policy, turn in first.items()}
    sessions = {policy: turn.session_id for policy, turn in begun.items()}
    assert len(set(sessions.values())) == 2
    for policy in reversed(POLICIES):
        turn = asked(both, policy, name, "one")
        assert await both.turns.version_of_parent(both.key, turn.evidence, turn.messages) == 0
        goes_on = await both.turns.insert(turn)
        assert (goes_on.session_id, goes_on.parent_turn_id) == (sessions[policy], first[policy].turn_id)
        found = await both.turns.load(turn.turn_id)
        assert found is not None
        assert (found.record.policy, found.record.evidence) == (policy, turn.evidence)
        view = await both.sessions.session(sessions[policy])
        assert view is not None
        assert (view.policy, view.key_id, view.external_id) == (policy, both.key, name)


async def test_both_in_one_batch_are_two_sessions(both: Stores) -> None:
    turns = [asked(both, policy, name) for name in ("s", None) for policy in POLICIES]
    inserted = await both.turns.insert_many(turns)
    assert len({turn.session_id for turn in inserted if isinstance(turn, InsertedTurn)}) == 4


async def test_a_conversation_known_to_one_policy_begins_anew_under_the_other(both: Stores) -> None:
    await both.turns.insert(asked(both, "default", None))
    moved = await both.turns.insert(asked(both, "anna", None, "one"))
    view = await both.sessions.session(moved.session_id)
    assert view is not None
    assert (view.policy, view.main_turns, moved.parent_turn_id) == ("anna", 1, None)


async def test_a_late_parent_is_found_by_the_turn_of_its_policy(both: Stores) -> None:
    turns = {policy: (asked(both, policy, None), asked(both, policy, None, "one")) for policy in POLICIES}
    for _, later in turns.values():
        await both.turns.insert(later)
    for policy, (first, later) in turns.items():
        late = await both.turns.insert(first)
        found = await both.turns.load(later.turn_id)
        assert found is not None
        assert (found.session_id, found.parent_turn_id) == (late.session_id, first.turn_id), policy


async def test_feedback_by_name_stays_with_the_policy(both: Stores) -> None:
    turns = {policy: asked(both, policy, "s") for policy in POLICIES}
    sessions = {policy: (await both.turns.insert(turn)).session_id for policy, turn in turns.items()}
    for policy, turn in turns.items():
        for name, number in (("s", 1), ("s", None), (None, None)):
            assert await both.feedback.turn_of(both.key, policy, name, number) == turn.turn_id, (policy, name)
        # Our own id names one session, whichever policy is meant.
        assert await both.feedback.turn_of(both.key, "default", str(sessions[policy]), 1) == turn.turn_id
    assert await both.feedback.turn_of(both.key, "berta", "s", 1) is None
    assert await both.feedback.give_outcome(both.key, "berta", "s", 1) is None
    for policy in POLICIES:
        assert await both.feedback.give_outcome(both.key, policy, "s", 1) is not None
    assert await both.feedback.give_outcome(both.key, "berta", str(sessions["anna"]), -1) is not None


async def test_an_erasure_takes_the_session_of_one_policy(both: Stores) -> None:
    own, chosen = asked(both, "default", "s"), asked(both, "anna", "s")
    sessions = [(await both.turns.insert(turn)).session_id for turn in (own, chosen)]
    await both.erasures.erase_session(sessions[1])
    erased, kept = await both.turns.load(chosen.turn_id), await both.turns.load(own.turn_id)
    assert erased is not None
    assert kept is not None
    assert (erased.outcome, kept.outcome) == (TurnOutcome.ERASED, TurnOutcome.WAITING)
    assert erased.record.evidence == SessionEvidence(SessionSource.HEADER, None, policy="anna")
    assert kept.record.messages == own.messages


async def test_a_turn_of_an_erased_session_keeps_its_policy_alone(both: Stores) -> None:
    late, first = asked(both, "anna", "s"), asked(both, "anna", "s")
    session = (await both.turns.insert(first)).session_id
    await both.erasures.erase_session(session)
    inserted = await both.turns.insert(late)
    found = await both.turns.load(late.turn_id)
    assert found is not None
    assert (inserted.session_id, inserted.erased) == (session, True)
    assert found.record.evidence == SessionEvidence(SessionSource.HEADER, None, policy="anna")
