"""Listing sessions and giving feedback, in memory and in PostgreSQL alike."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from clawloop.core.contracts.sessions import FeedbackEffect, SessionState
from clawloop.core.contracts.turns import CALLS_TOOLS, SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.contracts.views import SessionFilter, Tokens
from clawloop.core.errors import AmbiguousId, NotFound
from clawloop.core.ids import SessionId, new_turn_id, response_id
from clawloop.operations.reading import Reading, References
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
    first = await stores.sessions.sessions(SessionFilter(policy="default"), after=None, limit=3)
    assert [view.external_id for view in first] == ["d", "c", "b"]
    rest = await stores.sessions.sessions(SessionFilter(), after=first[-1].id, limit=3)
    assert [view.external_id for view in rest] == ["a"]
    ending = await stores.sessions.sessions(SessionFilter(state=SessionState.ENDING), after=None, limit=9)
    assert [view.external_id for view in ending] == ["b"]
    with pytest.raises(NotFound, match=r"no policy .other"):
        await stores.sessions.sessions(SessionFilter(policy="other\0"), after=None, limit=9)
    assert await stores.sessions.sessions(SessionFilter(), after=SessionId(new_turn_id()), limit=9) == []


async def test_a_session_shows_each_turn_with_its_outcome_and_why(stores: Stores) -> None:
    main = named(stores, "s", 0)
    side = named(stores, "s", 1, kind=TurnKind.SIDE, kind_reason="header X-Turn-Type: side")
    session = (await stores.turns.insert(main)).session_id
    await stores.turns.insert(side)
    view = await stores.sessions.session(session)
    assert view is not None
    assert (view.main_turns, view.side_turns, view.waiting, view.sampled) == (1, 1, 1, 0)
    first, second = await stores.sessions.turns(session)
    assert (first.id, first.number, first.outcome) == (main.turn_id, 1, TurnOutcome.WAITING)
    assert first.why.startswith("waits for Temporal")
    await stores.turns.mark_notified([main.turn_id])
    announced = await stores.sessions.turn(main.turn_id)
    assert announced is not None
    assert announced.why.startswith("waits for what follows it")
    assert (second.number, second.outcome, second.why) == (None, TurnOutcome.SIDE, "header X-Turn-Type: side")


async def test_an_unknown_session_is_none(stores: Stores) -> None:
    unknown = SessionId(new_turn_id())
    assert await stores.sessions.session(unknown) is None
    assert await stores.sessions.turns(unknown) == []


async def test_feedback_finds_its_turn_by_id_by_our_session_and_by_the_clients(stores: Stores) -> None:
    first, second = named(stores, "s", 0), named(stores, "s", 1)
    session = (await stores.turns.insert(first)).session_id
    await stores.turns.insert(second)
    assert await stores.feedback.turn_of(stores.key, "default", "s", 2) == second.turn_id
    assert await stores.feedback.turn_of(stores.key, "default", str(session), 1) == first.turn_id
    assert await stores.feedback.turn_of(stores.key, "default", "s", 3) is None
    assert await stores.feedback.turn_of(stores.other_key, "default", "s", 1) is None
    assert await stores.feedback.turn_of(stores.key, "default", "s", None) == second.turn_id
    other = named(stores, "other", 2)
    await stores.turns.insert(other)
    assert await stores.feedback.turn_of(stores.key, "default", None, None) == other.turn_id
    assert await stores.feedback.turn_of(stores.key, "default", "s", None) == second.turn_id
    assert await stores.feedback.turn_of(stores.other_key, "default", None, None) is None
    calling = named(stores, "other", 3, finish_reason=CALLS_TOOLS)
    only_calls = named(stores, "calls", 4, finish_reason=CALLS_TOOLS)
    await stores.turns.insert(calling)
    assert await stores.feedback.turn_of(stores.key, "default", "other", None) == other.turn_id
    assert await stores.feedback.turn_of(stores.key, "default", "other", 2) == calling.turn_id
    await stores.turns.insert(only_calls)
    assert await stores.feedback.turn_of(stores.key, "default", None, None) == other.turn_id
    assert await stores.feedback.turn_of(stores.key, "default", "calls", None) == only_calls.turn_id
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


async def test_sessions_and_turns_are_found_by_what_people_type(stores: Stores) -> None:
    first, second = named(stores, "mine", 0), named(stores, "mine", 1)
    session = (await stores.turns.insert(first)).session_id
    await stores.turns.insert(second)
    other = (await stores.turns.insert(named(stores, "other", 2))).session_id
    references = References(stores.sessions)
    view = await stores.sessions.session(session)
    assert view is not None
    for reference in (str(session), view.short_id, "mine", response_id(first.turn_id), str(second.turn_id)):
        assert await references.session(reference) == session
    assert await references.session("last") == other
    for shown in await stores.sessions.turns(session):
        assert await references.turn(shown.short_id) == shown.id
        assert await references.turn(shown.response_id) == shown.id
    assert await references.turn("mine:2") == second.turn_id
    assert await references.turn(f"{view.short_id}:1") == first.turn_id
    for unknown in ("", "mine:3", "mine:0", "mine:99999999999999999999", "nobody", "a\0b", str(new_turn_id())):
        with pytest.raises(NotFound):
            await references.turn(unknown)
    for unknown in ("", "nobody", "zzzz", "a\0b"):
        with pytest.raises(NotFound):
            await references.session(unknown)


async def test_the_beginning_of_several_ids_is_refused_with_longer_ones(stores: Stores) -> None:
    records = [named(stores, "s", minute) for minute in (0, 1)]
    for record in records:
        await stores.turns.insert(record)
    both = str(records[0].turn_id)[:8]  # of ids made at the same time the beginning is the same
    with pytest.raises(AmbiguousId) as raised:
        await References(stores.sessions).turn(both)
    session = await References(stores.sessions).session("s")
    for view in await stores.sessions.turns(session):
        assert view.short_id in str(raised.value)


async def test_a_client_that_uses_one_name_with_two_keys_has_to_give_an_id(stores: Stores) -> None:
    await stores.turns.insert(named(stores, "s", 0))
    await stores.turns.insert(replace(named(stores, "s", 1), api_key_id=stores.other_key))
    with pytest.raises(AmbiguousId):
        await References(stores.sessions).session("s")


async def test_single_turns_fold_away_and_are_counted(stores: Stores) -> None:
    await stores.turns.insert(named(stores, "side", 0, kind=TurnKind.SIDE))
    await stores.turns.insert(named(stores, "one", 1))
    reading = Reading(stores.sessions)
    page = await reading.page(SessionFilter(fold=True))
    assert ([view.external_id for view in page.sessions], page.total, page.folded) == (["one"], 1, 1)
    whole = await reading.page(SessionFilter(), limit=1)
    assert (whole.total, whole.folded, whole.next) == (2, 0, whole.sessions[0].id)
    assert whole.sessions[0].title == "one 1"


async def test_a_conversation_shows_what_each_turn_added(stores: Stores) -> None:
    first = named(stores, "s", 0)
    reply = {"role": "assistant", "content": "answer s 0", "tool_calls": []}  # as a client sends it back
    second = named(stores, "s", 1, messages=[*first.messages, reply, {"role": "user", "content": "shorter \ud800"}])
    session = (await stores.turns.insert(first)).session_id
    await stores.turns.insert(second)
    await stores.feedback.give(stores.key, second.turn_id, 1.0, "good")
    reading = Reading(stores.sessions)
    detail = await reading.session(str(session), content=True)
    assert detail.conversation is not None
    assert [message["content"] for message in detail.conversation[0].said] == ["s 0"]
    assert [one.repeated for one in detail.conversation] == [0, 2]
    assert str(detail.conversation[1].said[0]["content"]).startswith("shorter")
    assert [given.text for given in detail.conversation[1].judged.feedback] == ["good"]
    newest = await reading.session(str(session), limit=1)
    assert ([turn.id for turn in newest.turns], newest.earlier) == ([second.turn_id], second.turn_id)
    older = await reading.session(str(session), limit=1, before=str(newest.earlier))
    assert ([turn.id for turn in older.turns], older.earlier) == ([first.turn_id], None)
    given = await stores.feedback.given_on(stores.key, second.turn_id)
    assert given is not None
    assert [view.score for view in given] == [1.0]
    assert await stores.feedback.given_on(stores.other_key, second.turn_id) is None


async def test_a_turn_is_read_whole_and_with_tokens_on_request(stores: Stores) -> None:
    record = named(stores, "s", 0)
    await stores.turns.insert(record)
    detail = await Reading(stores.sessions).detail("last", tokens=True)
    assert (detail.messages, detail.response, detail.tokens) == (
        record.messages,
        record.response,
        Tokens(prompt_ids=[1, 2, 3], response_ids=[4, 5], logprobs=[-0.5, -0.25]),
    )
    assert (await Reading(stores.sessions).detail("last")).tokens is None


async def test_a_session_is_read_from_a_position_and_found_by_its_key_and_name(stores: Stores) -> None:
    records = [named(stores, "s", minute) for minute in range(3)]
    sessions = [(await stores.turns.insert(record)).session_id for record in records]
    found = await Reading(stores.sessions).session_from(sessions[0], 1, 1)
    assert [(turn.id, turn.number) for turn in found.turns] == [(records[1].turn_id, 2)]
    assert found.conversation is not None
    assert [exchange.turn_id for exchange in found.conversation] == [records[1].turn_id]
    assert found.earlier == records[1].turn_id
    assert [await stores.sessions.position(sessions[0], record.turn_id) for record in records] == [0, 1, 2]
    assert await stores.sessions.session_of_client(stores.key, "s") == sessions[0]
    assert await stores.sessions.session_of_client(stores.other_key, "s") is None
    assert (found.session.key_id, found.session.episode_id, found.session.erased) == (stores.key, None, False)
