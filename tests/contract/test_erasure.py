"""Content is erased for good, with its copies, judgements and files; bare turns stay."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import ApiKeyId, SessionId, TurnId, new_turn_id
from clawloop.core.judging.voting import HintVote
from clawloop.core.turns.classify import classify
from clawloop.core.turns.identify import identify
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.sessions import SessionOperations
from db.episodes.groups import PostgresEpisodeStore
from db.erasure import PostgresErasureStore
from tests.chats import assistant, system, user
from tests.contract.conftest import Stores
from tests.contract.episodes import LIFETIME, add_turns, new_group
from tests.contract.learning import PostgresLearning
from tests.contract.ledgers import GOOD, TIE, Ledger, fake_ledger, ledger, postgres_ledger
from tests.fakes.notifier import FakeNotifier
from tests.openclaw_chats import AGENT_PROMPT, COMPACTION, DEMO_LINE, MEMORY_FLUSH, TOOLS
from tests.records import turn_record

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]


# Content is erased for good, bare turns stay; turns in flight during an erasure are stored bare.

NAMED = SessionEvidence(SessionSource.HEADER, "s")
NAMELESS = SessionEvidence(SessionSource.CONVERSATION, None)


def conversation(stores: Stores, *questions: str, evidence: SessionEvidence = NAMED) -> list[TurnRecord]:
    messages: list[Message] = []
    turns: list[TurnRecord] = []
    for question in questions:
        messages = [*messages, {"role": "user", "content": question}]
        answer: Message = {"role": "assistant", "content": f"about {question}"}
        turns.append(turn_record(api_key_id=stores.key, evidence=evidence, messages=messages, response=answer))
        messages = [*messages, answer]
    return turns


async def insert(stores: Stores, *turns: TurnRecord) -> SessionId:
    return [(await stores.turns.insert(turn)).session_id for turn in turns][-1]


async def is_bare(stores: Stores, turn: TurnRecord) -> bool:
    stored = await stores.turns.load(turn.turn_id)
    assert stored is not None
    known = stored.record
    content = (known.messages, known.tools, known.response, known.prompt_ids, known.response_ids, known.logprobs)
    whole = known == turn
    bare = not any(content) and not known.sampling and known.evidence.value is None
    assert whole is not bare
    assert bare is (stored.outcome is TurnOutcome.ERASED)
    return bare


async def test_a_session_loses_all_content_and_keeps_its_turns(stores: Stores) -> None:
    turns = conversation(stores, "one", "two", "three")
    other = conversation(stores, "one", evidence=SessionEvidence(SessionSource.HEADER, "other"))
    session = await insert(stores, *turns)
    await insert(stores, *other)
    assert not any([await is_bare(stores, turn) for turn in turns])
    erasure = await stores.erasures.erase_session(session)
    assert erasure is not None
    assert (erasure.session.session_id, erasure.session.policy, erasure.turns) == (session, "default", 3)
    assert erasure.message.whole
    assert erasure.message.turns == tuple(turn.turn_id for turn in reversed(turns))
    assert all([await is_bare(stores, turn) for turn in turns])
    assert not await is_bare(stores, *other)
    assert [(view.outcome, view.why) for view in await stores.sessions.turns(session)] == [("erased", "erased")] * 3


async def test_erasing_is_idempotent(stores: Stores) -> None:
    (turn,) = conversation(stores, "one")
    session = await insert(stores, turn)
    first = await stores.erasures.erase_session(session)
    again = await stores.erasures.erase_session(session)
    assert first is not None
    assert again is not None
    assert (first.turns, again.turns) == (1, 0)
    assert first.message == again.message  # a workflow that missed the first message gets the same one


async def test_erasing_an_unknown_session_or_turn_is_none(stores: Stores) -> None:
    assert await stores.erasures.erase_session(SessionId(uuid4())) is None
    assert await stores.erasures.erase_turn(new_turn_id()) is None


async def test_a_turn_is_erased_with_all_turns_that_hold_its_content_and_no_others(stores: Stores) -> None:
    first, second, third = conversation(stores, "one", "two", "three")
    regenerated = replace(second, turn_id=new_turn_id(), response={"role": "assistant", "content": "another reply"})
    session = await insert(stores, first, second, third, regenerated)
    erasure = await stores.erasures.erase_turn(second.turn_id)
    assert erasure is not None
    assert (erasure.turns, erasure.message.whole) == (3, False)
    assert erasure.message.turns == (regenerated.turn_id, third.turn_id, second.turn_id)
    bare = [await is_bare(stores, turn) for turn in (first, second, third, regenerated)]
    assert bare == [False, True, True, True]
    # Once more from there reaches what continues it, and finds nothing left.
    again = await stores.erasures.erase_turn(second.turn_id)
    assert again is not None
    assert (again.turns, again.session.session_id) == (0, session)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
async def test_a_turn_is_erased_with_one_that_continues_it_after_an_abort(stores: Stores, begun: bool) -> None:
    before, stopped = conversation(stores, "one", "two")
    if begun:
        await insert(stores, before)
    messages = stopped.messages if begun else before.messages
    stopped = replace(stopped, messages=messages, response={"role": "assistant", "content": "abo"})
    goes_on = replace(stopped, turn_id=new_turn_id(), messages=[*messages, {"role": "user", "content": "three"}])
    beside = replace(
        stopped,
        turn_id=new_turn_id(),
        messages=[*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}!"}],
    )
    await insert(stores, stopped, goes_on, beside)
    erasure = await stores.erasures.erase_turn(stopped.turn_id)
    assert erasure is not None
    assert erasure.message.turns == (goes_on.turn_id, stopped.turn_id)
    assert [await is_bare(stores, turn) for turn in (stopped, goes_on, beside)] == [True, True, False]


@pytest.mark.parametrize("evidence", [NAMED, NAMELESS], ids=["named", "nameless"])
async def test_a_turn_in_flight_while_its_session_was_erased_is_stored_bare(
    stores: Stores, evidence: SessionEvidence
) -> None:
    first, second, third = conversation(stores, "one", "two", "three", evidence=evidence)
    session = await insert(stores, first)
    await stores.erasures.erase_session(session)
    inserted = await stores.turns.insert(second)  # e.g. from a spool: it began before
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, True)
    assert await is_bare(stores, second)
    # What a client says afterwards is new, also where it says the same again.
    later = replace(third, started_at=third.started_at + timedelta(hours=1))
    inserted = await stores.turns.insert(later)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, False)
    assert not await is_bare(stores, later)


@pytest.mark.parametrize("evidence", [NAMED, NAMELESS], ids=["named", "nameless"])
async def test_a_turn_that_continues_an_erased_one_and_began_before_is_stored_bare(
    stores: Stores, evidence: SessionEvidence
) -> None:
    first, second, third, fourth = conversation(stores, "one", "two", "three", "four", evidence=evidence)
    regenerated = replace(second, turn_id=new_turn_id(), response={"role": "assistant", "content": "another reply"})
    session = await insert(stores, first, second)
    await stores.erasures.erase_turn(second.turn_id)
    for on_its_way in (third, regenerated, fourth):  # e.g. an engine is still answering
        inserted = await stores.turns.insert(on_its_way)
        assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, True)
        assert await is_bare(stores, on_its_way)
    assert not await is_bare(stores, first)
    later = replace(third, turn_id=new_turn_id(), started_at=third.started_at + timedelta(hours=1))
    inserted = await stores.turns.insert(later)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, first.turn_id, False)
    assert not await is_bare(stores, later)


async def test_a_turn_of_another_branch_than_an_erased_one_keeps_its_content(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    _, beside = conversation(stores, "one", "something else")
    session = await insert(stores, first, second)
    await stores.erasures.erase_turn(second.turn_id)
    inserted = await stores.turns.insert(beside)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, first.turn_id, False)


async def test_a_late_turn_does_not_become_the_parent_of_erased_ones(stores: Stores) -> None:
    late, first, second = conversation(stores, "one", "two", "three")
    await insert(stores, first, second)
    await stores.erasures.erase_turn(first.turn_id)
    inserted = await stores.turns.insert(late)
    assert not inserted.erased
    assert not await is_bare(stores, late)
    assert [await is_bare(stores, turn) for turn in (first, second)] == [True, True]


async def test_an_erased_turn_cannot_be_rated(stores: Stores) -> None:
    (turn,) = conversation(stores, "one")
    session = await insert(stores, turn)
    assert await stores.feedback.give(stores.key, turn.turn_id, 1.0, None) is not None
    await stores.erasures.erase_session(session)
    assert await stores.feedback.give(stores.key, turn.turn_id, None, "words") is None


async def test_a_session_that_continues_after_erasure_has_its_name_again(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    session = await insert(stores, first)
    await stores.erasures.erase_session(session)
    later = replace(second, started_at=second.started_at + timedelta(hours=1))
    await insert(stores, later)
    assert await stores.feedback.turn_of(stores.key, "default", "s", 2) == TurnId(later.turn_id)


# With a session go the copies of its text in side sessions, as OpenClaw without its headers makes them.

STAMP = "[Mon 2026-11-23 12:55 UTC]"
KEYS = "Where did I leave the keys of the summer house?"
RIVERS = "Which is longer, the Rhine or the Elbe at low water?"


def agent_turn(said: str, session: str, *more: Message) -> list[Message]:
    line = DEMO_LINE.replace("sessionId=side-demo", f"sessionId={session}")
    return [AGENT_PROMPT, user(f"{STAMP} {said}\n\n{line}"), *more]


def flush(said: str, reply: str) -> list[Message]:
    """OpenClaw runs it under a name of its own."""
    return agent_turn(said, f"internal-session-effects-{len(said)}", assistant(reply), user(MEMORY_FLUSH))


def summary(of: str) -> list[Message]:
    return [system(COMPACTION), user(f"<conversation>\n[User]: {of}\n</conversation>\n\nSummarize.")]


def record(key: ApiKeyId, messages: list[Message], reply: str) -> TurnRecord:
    body: dict[str, Any] = {"messages": messages, "tools": None if messages[0]["content"] == COMPACTION else TOOLS}
    return turn_record(
        api_key_id=key,
        messages=messages,
        response=assistant(reply),
        evidence=identify({}, body),
        kind=classify({}, body, side_alias=False).kind,
    )


async def insert_all(stores: Stores, *turns: TurnRecord) -> list[SessionId]:
    return [(await stores.turns.insert(turn)).session_id for turn in turns]


async def erased(stores: Stores, *turns: TurnRecord) -> list[bool]:
    stored = [await stores.turns.load(turn.turn_id) for turn in turns]
    return [turn is not None and turn.outcome is TurnOutcome.ERASED for turn in stored]


async def test_summaries_and_flushes_of_a_session_are_erased_with_it(stores: Stores, tmp_path: Path) -> None:
    own = record(stores.key, agent_turn(KEYS, "side-demo"), "In the blue bowl beside the door.")
    copies = [
        record(stores.key, flush(KEYS, "In the blue bowl beside the door."), "NO_REPLY"),
        record(stores.key, summary(KEYS), "## Goal\nThe user looks for the keys of a house."),
        record(stores.key, summary("<previous>\nThe user looks for the keys of a house.\n</previous>"), "## Goal"),
    ]
    others = [
        record(stores.key, agent_turn(RIVERS, "other-demo"), "The Rhine."),
        record(stores.key, flush(RIVERS, "The Rhine."), "NO_REPLY"),
        record(stores.key, summary(RIVERS), "## Goal\nRivers"),
        record(stores.other_key, summary(KEYS), "## Goal\nOf another key."),
    ]
    assert [turn.kind for turn in copies] == [TurnKind.SIDE] * 3
    sessions = await insert_all(stores, own, *copies, *others)
    assert len(set(sessions)) == len(sessions)
    artifacts = ArtifactFolder(tmp_path)
    operations = SessionOperations(None, stores.erasures, artifacts.delete, FakeNotifier())  # type: ignore[arg-type]  # nothing is judged
    applied = await operations.erase_session(sessions[0])
    assert applied is not None
    assert applied.result.turns == 1 + len(copies)
    assert applied.result.session.session_id == sessions[0]
    assert await erased(stores, own, *copies) == [True] * 4
    assert await erased(stores, *others) == [False] * 4
    again = await operations.erase_session(sessions[0])
    assert again is not None
    assert again.result.turns == 0


# Judgements whose evidence was erased, in memory and in PostgreSQL alike.

NOW = timedelta(0)


async def test_an_answer_is_not_stored_once_the_next_state_is_erased(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    ledger.erase(second.turn_id)
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    await ledger.judgements.store_direct_vote(opened.id, {1: -0.1, 0: -3.0, -1: -4.0}, 1)
    await ledger.judgements.store_hints(opened.id, "hint", [(0, "h", HintVote(True, "words of it"))])
    with pytest.raises(RecordUnusable, match=f"{second.turn_id} was erased"):
        await ledger.judgements.finalize(opened.id, GOOD, [])
    for open_it in (ledger.judgements.open, ledger.judgements.revise):
        with pytest.raises(RecordUnusable, match=f"{second.turn_id} was erased"):
            await open_it(first.turn_id, second.turn_id, b"e", "hint")
    seen = await ledger.judgements.open(first.turn_id, None, b"e", "hint")
    assert (seen.votes, seen.direct, seen.hints) == ({}, None, {})
    assert (await ledger.outcome_of(first))[0] is TurnOutcome.WAITING
    assert ledger.samples(first.turn_id) == []


async def test_a_rating_after_the_next_state_was_erased_gets_a_judgement_of_its_own(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, TIE, [])
    ledger.erase(second.turn_id)
    given = await ledger.give(first.turn_id, 1.0, None)
    amended = await ledger.judgements.revise(first.turn_id, None, b"e", "hint")
    assert amended.id != opened.id
    await ledger.judgements.finalize(amended.id, GOOD, [given])
    assert await ledger.samples_of(first) == [1.0]


async def test_a_judgement_opened_without_a_next_state_never_gets_one(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.revise(first.turn_id, None, b"e", "hint")
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    later = await ledger.judgements.revise(first.turn_id, second.turn_id, b"e", "hint")
    assert (later.id != opened.id, later.votes) == (True, {})
    assert (await ledger.judgements.revise(first.turn_id, second.turn_id, b"e", "hint")).id == later.id
    await ledger.judgements.finalize(later.id, GOOD, [])
    context = await ledger.judgements.load_context(first.turn_id)
    assert context is not None
    assert context.current is not None
    assert context.current.next_turn_id == second.turn_id


async def test_a_turn_erased_before_its_workflow_was_notified_is_never_notified(ledger: Ledger) -> None:
    first, second, third = ledger.talk("one", "two", "three")
    await ledger.insert(first, second)
    await ledger.stores.erasures.erase_turn(second.turn_id)
    await ledger.insert(third)  # it was on its way
    found = await ledger.sweep.pending_turns(NOW, 10)
    assert [told.turn_id for _, told in found] == [first.turn_id]


# With the session of an episode goes what its agent left in its sandbox.


async def test_what_an_agent_left_is_erased_with_its_session(
    postgres_learning: PostgresLearning, tmp_path: Path
) -> None:
    artifacts, episodes = ArtifactFolder(tmp_path), PostgresEpisodeStore(postgres_learning.database)
    erasures = PostgresErasureStore(postgres_learning.database)
    operations = SessionOperations(None, erasures, artifacts.delete, FakeNotifier())  # type: ignore[arg-type]  # nothing is judged
    group = new_group(3)
    await episodes.make_group(group)
    turns: list[TurnRecord] = []
    # The second and third agent left the same.
    for place, left in enumerate((b"of one", b"of two", b"of two")):
        episode = await episodes.begin_episode(group.id, place, 1, LIFETIME)
        turns += await add_turns(postgres_learning, episode, 1)
        await episodes.end_episode(
            EpisodeEnd(episode.id, Ending.COMPLETED, artifact_sha256=await artifacts.store(left))
        )
    assert len(artifacts.digests()) == 2

    async def erase(turn: TurnRecord) -> None:
        assert await operations.erase_session(await session_of(postgres_learning, turn)) is not None

    await erase(turns[0])
    [kept] = artifacts.digests()
    assert await artifacts.load(kept) == b"of two"
    await erase(turns[1])
    assert artifacts.digests() == [kept]  # another episode's agent left it, too
    await erase(turns[2])
    assert artifacts.digests() == []
    await erase(turns[0])  # idempotent


async def test_two_erasures_at_the_same_moment_delete_what_both_agents_left(
    postgres_learning: PostgresLearning, tmp_path: Path
) -> None:
    artifacts, episodes = ArtifactFolder(tmp_path), PostgresEpisodeStore(postgres_learning.database)
    both_looked = asyncio.Barrier(2)

    class Erasures(PostgresErasureStore):
        """Both look for what is left before either erases its session."""

        async def copies_of(self, session: SessionId) -> list[SessionId]:
            await both_looked.wait()
            return await super().copies_of(session)

    erasures = Erasures(postgres_learning.database)
    operations = SessionOperations(None, erasures, artifacts.delete, FakeNotifier())  # type: ignore[arg-type]  # nothing is judged
    group = new_group(2)
    await episodes.make_group(group)
    sessions: list[SessionId] = []
    for place in range(2):
        episode = await episodes.begin_episode(group.id, place, 1, LIFETIME)
        [turn] = await add_turns(postgres_learning, episode, 1)
        sessions.append(await session_of(postgres_learning, turn))
        await episodes.end_episode(
            EpisodeEnd(episode.id, Ending.COMPLETED, artifact_sha256=await artifacts.store(b"the same"))
        )
    await asyncio.gather(*map(operations.erase_session, sessions))
    assert artifacts.digests() == []


async def test_an_episode_without_turns_keeps_what_its_agent_left_until_it_is_verified(
    postgres_learning: PostgresLearning,
) -> None:
    database = postgres_learning.database
    episodes, erasures = PostgresEpisodeStore(database), PostgresErasureStore(database)
    group = new_group(2)
    await episodes.make_group(group)
    digest = hashlib.sha256(b"nothing").hexdigest()
    one, two = [await episodes.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    [turn] = await add_turns(postgres_learning, one, 1)
    for episode in (one, two):
        await episodes.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED, artifact_sha256=digest))
    session = await session_of(postgres_learning, turn)
    assert await erasures.artifacts_of(session) == []
    await episodes.score_episode(EpisodeScore(two.id, 0.0, "checked"))
    assert await erasures.artifacts_of(session) == [digest]


async def test_what_an_agent_left_is_erased_however_its_episode_ended(postgres_learning: PostgresLearning) -> None:
    database = postgres_learning.database
    episodes, erasures = PostgresEpisodeStore(database), PostgresErasureStore(database)
    group = new_group(2)
    await episodes.make_group(group)
    digests = [hashlib.sha256(left).hexdigest() for left in (b"one", b"two")]
    failed, late = [await episodes.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    turns = [(await add_turns(postgres_learning, episode, 1))[0] for episode in (failed, late)]
    await episodes.end_episode(EpisodeEnd(failed.id, Ending.INFRASTRUCTURE, "away", digests[0]))
    await episodes.begin_episode(group.id, 1, 2, LIFETIME)  # takes its place
    await episodes.end_episode(EpisodeEnd(late.id, Ending.COMPLETED, artifact_sha256=digests[1]))
    for turn, digest in zip(turns, digests, strict=True):
        assert await erasures.artifacts_of(await session_of(postgres_learning, turn)) == [digest]


async def session_of(learning: PostgresLearning, turn: TurnRecord) -> SessionId:
    stored = await learning.turns.load(turn.turn_id)
    assert stored is not None
    return stored.session_id
