"""Listing sessions and giving feedback, in memory and in PostgreSQL alike."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from clawloop.contracts.sessions import FeedbackEffect, SessionState
from clawloop.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.ids import SessionId, new_turn_id
from tests.contract.conftest import Stores
from tests.records import turn_record


def named(stores: Stores, session: str, minute: int, **changes: object) -> TurnRecord:
    record = turn_record(
        f"{session} {minute}",
        api_key_id=stores.key,
        evidence=SessionEvidence(SessionSource.HEADER, session),
        response={"role": "assistant", "content": f"answer {session} {minute}"},
    )
    return replace(record, started_at=record.started_at + timedelta(minutes=minute), **changes)  # type: ignore[arg-type]


async def test_sessions_are_listed_newest_first_in_pages_and_by_filter(stores: Stores) -> None:
    for minute, name in enumerate(["a", "b", "c", "d"]):
        await stores.turns.insert(named(stores, name, minute, ends_session=name == "b"))
    first = await stores.sessions.sessions(policy="default", state=None, after=None, limit=3)
    assert [view.external_id for view in first] == ["d", "c", "b"]
    rest = await stores.sessions.sessions(policy=None, state=None, after=first[-1].id, limit=3)
    assert [view.external_id for view in rest] == ["a"]
    ending = await stores.sessions.sessions(policy=None, state=SessionState.ENDING, after=None, limit=9)
    assert [view.external_id for view in ending] == ["b"]
    assert await stores.sessions.sessions(policy="other\0", state=None, after=None, limit=9) == []
    assert await stores.sessions.sessions(policy=None, state=None, after=SessionId(new_turn_id()), limit=9) == []


async def test_a_session_shows_each_turn_with_its_outcome_and_why(stores: Stores) -> None:
    main = named(stores, "s", 0)
    side = named(stores, "s", 1, kind=TurnKind.SIDE, kind_reason="header X-Turn-Type: side")
    session = (await stores.turns.insert(main)).session_id
    await stores.turns.insert(side)
    view = await stores.sessions.session(session)
    assert view is not None
    assert (view.main_turns, view.side_turns, view.waiting, view.sampled) == (1, 1, 1, 0)
    first, second = await stores.sessions.turns(session)
    assert (first.id, first.number, first.outcome, first.why) == (main.turn_id, 1, TurnOutcome.WAITING, None)
    assert (second.number, second.outcome, second.why) == (None, TurnOutcome.SIDE, "header X-Turn-Type: side")


async def test_an_unknown_session_is_none(stores: Stores) -> None:
    unknown = SessionId(new_turn_id())
    assert await stores.sessions.session(unknown) is None
    assert await stores.sessions.turns(unknown) == []


async def test_feedback_finds_its_turn_by_id_by_our_session_and_by_the_clients(stores: Stores) -> None:
    first, second = named(stores, "s", 0), named(stores, "s", 1)
    session = (await stores.turns.insert(first)).session_id
    await stores.turns.insert(second)
    assert await stores.feedback.turn_of(stores.key, "s", 2) == second.turn_id
    assert await stores.feedback.turn_of(stores.key, str(session), 1) == first.turn_id
    assert await stores.feedback.turn_of(stores.key, "s", 3) is None
    assert await stores.feedback.turn_of(stores.other_key, "s", 1) is None
    assert await stores.feedback.turn_of(stores.key, "s", None) == second.turn_id
    other = named(stores, "other", 2)
    await stores.turns.insert(other)
    assert await stores.feedback.turn_of(stores.key, None, None) == other.turn_id
    assert await stores.feedback.turn_of(stores.key, "s", None) == second.turn_id
    assert await stores.feedback.turn_of(stores.other_key, None, None) is None
    given = await stores.feedback.give(stores.key, first.turn_id, 0.5, "well \0 done")
    assert given is not None
    assert (given.given.turn_id, given.session.session_id, given.effect) == (
        first.turn_id,
        session,
        FeedbackEffect.AMENDS,
    )
    await stores.feedback.mark_feedback_notified(given.given.feedback_id)


async def test_feedback_on_another_keys_turn_or_a_side_turn_is_refused(stores: Stores) -> None:
    main, side = named(stores, "s", 0), named(stores, "s", 1, kind=TurnKind.SIDE)
    await stores.turns.insert(main)
    await stores.turns.insert(side)
    assert await stores.feedback.give(stores.other_key, main.turn_id, 1.0, None) is None
    assert await stores.feedback.give(stores.key, side.turn_id, 1.0, None) is None
    assert await stores.feedback.give(stores.key, new_turn_id(), 1.0, None) is None


async def test_feedback_on_a_turn_that_cannot_be_trained_is_only_recorded(stores: Stores) -> None:
    broken = named(stores, "s", 0, response=None, response_ids=None, logprobs=None)
    await stores.turns.insert(broken)
    given = await stores.feedback.give(stores.key, broken.turn_id, None, "it broke")
    assert given is not None
    assert given.effect is FeedbackEffect.RECORDED
