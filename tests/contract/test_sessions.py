"""Sessions: listed, rated, compared with another judge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import psycopg
import pytest

from clawloop.core.contracts.sessions import FeedbackAnswer, FeedbackEffect, RepeatableRequest, SessionState
from clawloop.core.contracts.turns import CALLS_TOOLS, SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.contracts.views import SessionFilter, Tokens
from clawloop.core.errors import AlreadyAnswered, AmbiguousId, NotFound
from clawloop.core.ids import SessionId, TurnId, new_feedback_id, new_turn_id, response_id
from clawloop.core.judging.agreement import Pair
from clawloop.core.judging.hints import HintChoice
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.judging.voting import Verdict, Vote
from clawloop.operations.history import HistoryKey, HistoryStore, HistoryTurn, NewVerdict
from clawloop.operations.reading import Reading, References
from db.database import Database
from db.episodes.groups import PostgresEpisodeStore
from db.judging.feedback import PostgresFeedbackStore
from db.judging.rejudging import PostgresHistoryStore
from tests.contract.conftest import TEST_LIMIT, Stores
from tests.contract.episodes import LIFETIME, new_group
from tests.contract.learning import POLICY, PostgresLearning
from tests.fakes.history_store import FakeHistoryStore
from tests.records import turn_record

# Listing sessions and giving feedback, in memory and in PostgreSQL alike.


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
    await stores.turns.mark_notified([main.turn_id], timedelta(0))
    announced = await stores.sessions.turn(main.turn_id)
    assert announced is not None
    assert announced.why.startswith("waits for a reaction")
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
    await stores.feedback.mark_feedback_notified(given.given.feedback_id, timedelta(0))


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


# Repeated requests to give feedback, on the fake and on PostgreSQL.

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


# Stores of compared verdicts: each turn once a comparison, and what differs until it is applied.

KEY = HistoryKey(POLICY, "hash", "judge")


class Bench(Protocol):
    """Three turns with the verdict 1, and what happens to them beside the comparison."""

    @property
    def store(self) -> HistoryStore: ...

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None: ...

    async def rate(self, turn: TurnId) -> None: ...

    async def give_to_episode(self, turn: TurnId) -> None:
        """As if it had always been an episode's."""


@dataclass
class FakeBench:
    store: FakeHistoryStore

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None:
        self.store.judge_again(turn, verdict)

    async def rate(self, turn: TurnId) -> None:
        self.store.rate(turn)

    async def give_to_episode(self, turn: TurnId) -> None:
        self.store.of_episodes.add(turn)


@dataclass
class PostgresBench:
    store: PostgresHistoryStore
    learning: PostgresLearning

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None:
        judgements = self.learning.judgements
        opened = await judgements.open(turn, None, b"evidence", "hint", revision=1)
        finalized = FinalizedJudgement(
            verdict=Verdict(verdict, float(verdict), float(verdict), "3 of 3 votes"),
            hint=HintChoice((), answered=True, why="none"),
            not_trainable=None,
            reward=float(verdict),
            hinted_prompts=(),
            outcome=TurnOutcome.SAMPLED,
            why=f"verdict {verdict}",
        )
        await judgements.finalize(opened.id, finalized, [])

    async def rate(self, turn: TurnId) -> None:
        insert = "INSERT INTO feedback (id, turn_id, api_key_id, score, effect) VALUES (%s, %s, %s, 1, 'amends')"
        await self.learning.execute(insert, new_feedback_id(), turn, self.learning.key)

    async def give_to_episode(self, turn: TurnId) -> None:
        episodes, group = PostgresEpisodeStore(self.learning.database), new_group(2)
        await episodes.make_group(group)
        episode = await episodes.begin_episode(group.id, 0, 1, LIFETIME)
        await self.learning.execute("UPDATE turns SET episode_id = %s WHERE id = %s", episode.id, turn)


@pytest.fixture
async def postgres_history(postgres_learning: PostgresLearning) -> Bench:
    await postgres_learning.add_samples(3)
    return PostgresBench(PostgresHistoryStore(postgres_learning.database), postgres_learning)


@pytest.fixture
def fake_history() -> Bench:
    return FakeBench(FakeHistoryStore([HistoryTurn(new_turn_id(), 0, 1) for _ in range(3)]))


@pytest.fixture(params=["fake", "postgres"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench: Bench = request.getfixturevalue(f"{request.param}_history")
    return bench


@pytest.fixture
def store(bench: Bench) -> HistoryStore:
    """Three judged turns."""
    return bench.store


async def test_each_turn_is_compared_once(store: HistoryStore) -> None:
    first, second, third = await store.next_turns(KEY, 10)
    assert {first.verdict, second.verdict, third.verdict} <= {-1, 0, 1}
    assert [turn.turn_id for turn in await store.next_turns(KEY, 2)] == [first.turn_id, second.turn_id]
    await store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await store.record(KEY, first, NewVerdict(first.verdict, "comes too late"))
    await store.record(KEY, second, NewVerdict(second.verdict, "agrees"))
    assert await store.left(KEY) == 1
    assert await store.next_turns(KEY, 10) == [third]
    pairs = [Pair(0, first.verdict, -first.verdict), Pair(0, second.verdict, second.verdict)]
    assert sorted(map(str, await store.pairs(KEY))) == sorted(map(str, pairs))


async def test_another_judge_and_another_recipe_are_other_comparisons(store: HistoryStore) -> None:
    (first, *_) = await store.next_turns(KEY, 1)
    await store.record(KEY, first, NewVerdict(1, "x"))
    for other in (HistoryKey(POLICY, "hash", "another"), HistoryKey(POLICY, "other", "judge")):
        assert (await store.left(other), await store.pairs(other)) == (3, [])


async def test_what_differs_is_listed_until_it_is_applied(store: HistoryStore) -> None:
    first, second, third = await store.next_turns(KEY, 3)
    await store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await store.record(KEY, second, NewVerdict(None, "no valid vote"))
    await store.record(KEY, third, NewVerdict(-third.verdict, "differs"))
    assert await store.differing(KEY) == [first.turn_id, third.turn_id]
    await store.mark_applied(KEY, [first.turn_id])
    assert await store.differing(KEY) == [third.turn_id]


async def test_what_was_rated_or_judged_again_since_is_left_as_it_is(bench: Bench) -> None:
    first, second, third = await bench.store.next_turns(KEY, 3)
    for turn in (first, second, third):
        await bench.store.record(KEY, turn, NewVerdict(-turn.verdict, "differs"))
    await bench.rate(first.turn_id)
    assert await bench.store.differing(KEY) == [second.turn_id, third.turn_id]
    await bench.judge_again(second.turn_id, 1)
    assert await bench.store.differing(KEY) == [third.turn_id]
    await bench.judge_again(third.turn_id, -1)
    assert await bench.store.differing(KEY) == []


async def test_a_verdict_that_changed_while_the_other_judge_was_asked_is_left_as_it_is(bench: Bench) -> None:
    (first, *_) = await bench.store.next_turns(KEY, 3)
    await bench.judge_again(first.turn_id, -1)
    await bench.store.record(KEY, first, NewVerdict(-first.verdict, "agrees with the new one"))
    assert await bench.store.differing(KEY) == []


async def test_turns_of_episodes_are_not_compared_as_nobody_can_have_them_judged_again(bench: Bench) -> None:
    first, second, third = await bench.store.next_turns(KEY, 3)
    await bench.store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await bench.store.record(KEY, second, NewVerdict(second.verdict, "agrees"))
    for turn in (first, third):
        await bench.give_to_episode(turn.turn_id)
    assert (await bench.store.next_turns(KEY, 10), await bench.store.left(KEY)) == ([], 0)
    assert await bench.store.pairs(KEY) == [Pair(0, second.verdict, second.verdict)]
    assert await bench.store.differing(KEY) == []
