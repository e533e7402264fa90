"""With the session of an episode goes what its agent left in its sandbox."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.ids import SessionId
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.sessions import SessionOperations
from db.episodes.groups import PostgresEpisodeStore
from db.erasure import PostgresErasureStore
from tests.contract.episodes import LIFETIME, add_turns, new_group
from tests.contract.learning import PostgresLearning
from tests.fakes.notifier import FakeNotifier


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
