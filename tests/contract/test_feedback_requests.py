"""Repeated requests to give feedback, on the fake and on PostgreSQL."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from clawloop.core.contracts.sessions import FeedbackAnswer, FeedbackEffect, RepeatableRequest
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnRecord
from clawloop.core.errors import AlreadyAnswered
from clawloop.core.ids import new_turn_id
from db.database import Database
from db.judging.feedback import PostgresFeedbackStore
from tests.contract.conftest import TEST_LIMIT, Stores
from tests.records import turn_record

REQUEST = RepeatableRequest(b"key", b"body")


async def inserted(stores: Stores, session: str = "s") -> TurnRecord:
    evidence = SessionEvidence(SessionSource.HEADER, session)
    turn = turn_record(api_key_id=stores.key, evidence=evidence, messages=[{"role": "user", "content": "one"}])
    await stores.turns.insert(turn)
    return turn


async def test_a_request_is_answered_once(stores: Stores) -> None:
    turn = await inserted(stores)
    assert await stores.feedback.answer_to(stores.key, REQUEST) is None
    given = await stores.feedback.give(stores.key, turn.turn_id, 1.0, None, REQUEST)
    assert given is not None
    answer = FeedbackAnswer(b"body", given.given.feedback_id, FeedbackEffect.AMENDS)
    assert await stores.feedback.answer_to(stores.key, RepeatableRequest(b"key", b"other")) == answer
    with pytest.raises(AlreadyAnswered):
        await stores.feedback.give(stores.key, turn.turn_id, 1.0, None, REQUEST)
    views = await stores.feedback.given_on(stores.key, turn.turn_id)
    assert views is not None
    assert [view.id for view in views] == [given.given.feedback_id]
    assert await stores.feedback.answer_to(stores.other_key, REQUEST) is None


async def test_an_outcome_is_answered_once(stores: Stores) -> None:
    await inserted(stores)
    effect = await stores.feedback.give_outcome(stores.key, "default", "s", 1, REQUEST)
    assert effect is not None
    assert await stores.feedback.answer_to(stores.key, REQUEST) == FeedbackAnswer(b"body", None, effect)
    with pytest.raises(AlreadyAnswered):
        await stores.feedback.give_outcome(stores.key, "default", "s", -1, REQUEST)


async def test_a_request_without_a_turn_is_not_remembered(stores: Stores) -> None:
    assert await stores.feedback.give(stores.key, new_turn_id(), 1.0, None, REQUEST) is None
    assert await stores.feedback.give_outcome(stores.key, "default", "none", 1, REQUEST) is None
    assert await stores.feedback.answer_to(stores.key, REQUEST) is None


async def test_feedback_on_an_erased_turn_is_refused_and_its_answer_stays(stores: Stores) -> None:
    turn = await inserted(stores)
    given = await stores.feedback.give(stores.key, turn.turn_id, 1.0, None, REQUEST)
    await stores.erasures.erase_turn(turn.turn_id)
    assert await stores.feedback.give(stores.key, turn.turn_id, 1.0, None) is None
    assert given is not None
    answer = await stores.feedback.answer_to(stores.key, REQUEST)
    assert answer is not None
    assert answer.feedback_id == given.given.feedback_id


async def test_simultaneous_requests_store_one_feedback(postgres_stores: Stores, postgres_url: str) -> None:
    turn = await inserted(postgres_stores)
    others = [Database(postgres_url, TEST_LIMIT) for _ in range(3)]
    gateways = [PostgresFeedbackStore(one) for one in others]
    results = await asyncio.gather(
        *(store.give(postgres_stores.key, turn.turn_id, 1.0, None, REQUEST) for store in gateways),
        return_exceptions=True,
    )
    for one in others:
        await one.close()
    assert sum(isinstance(result, AlreadyAnswered) for result in results) == 2
    views = await postgres_stores.feedback.given_on(postgres_stores.key, turn.turn_id)
    assert views is not None
    assert len(views) == 1


async def test_old_answers_are_forgotten_and_others_survive_a_restart(
    postgres_stores: Stores, postgres_url: str
) -> None:
    turn = await inserted(postgres_stores)
    for age, key in ((31, b"old"), (29, b"young")):
        await postgres_stores.feedback.give(postgres_stores.key, turn.turn_id, 1.0, None, RepeatableRequest(key, b"b"))
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            change = (
                "UPDATE feedback_requests SET received_at = now() - make_interval(days => %s) WHERE key_sha256 = %s"
            )
            connection.execute(change, [age, key])
    restarted = Database(postgres_url, TEST_LIMIT)
    store = PostgresFeedbackStore(restarted)
    await store.give(postgres_stores.key, turn.turn_id, 1.0, None, REQUEST)
    known = [await store.answer_to(postgres_stores.key, RepeatableRequest(key, b"b")) for key in (b"old", b"young")]
    await restarted.close()
    assert [answer is not None for answer in known] == [False, True]
