"""What the benchmark of rollouts finds in the ledger after it killed processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from benchmarks.episode_ledger import Scored, count_by_environment, places_since, scored_since, turns_lost
from clawloop.core.contracts.episodes import Ending, EpisodeBegun, EpisodeEnd, EpisodeScore
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnStatus
from clawloop.core.ids import ApiKeyId
from db.episodes.groups import PostgresEpisodeStore
from tests.contract.episodes import LIFETIME, new_group
from tests.contract.learning import PostgresLearning
from tests.records import turn_record

LONG_AGO = datetime.now(UTC) - timedelta(days=1)
REPLIES = {"tool-call": 2}
SAYS: Message = {"role": "assistant", "content": "wait"}


@pytest.fixture
def connection(postgres_learning: PostgresLearning) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_learning.url, autocommit=True) as opened:
        yield opened


async def played(learning: PostgresLearning, *endings: Ending) -> list[EpisodeBegun]:
    """Scored episodes of one group, whose agents asked twice, and sent the first request again."""
    store = PostgresEpisodeStore(learning.database)
    group = new_group(len(endings))
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(len(endings))]
    for episode, ending in zip(episodes, endings, strict=True):
        for number in (0, 0, 1):
            await ask(learning, episode, number)
        await ask(learning, episode, 2, status=TurnStatus.ABORTED)
        await store.end_episode(EpisodeEnd(episode.id, ending))
        await store.score_episode(EpisodeScore(episode.id, 0.0, ""))
    return episodes


async def ask(learning: PostgresLearning, episode: EpisodeBegun, number: int, **fields: Any) -> None:
    """The next turn of the episode's conversation, after so many others."""
    asked: Message = {"role": "user", "content": f"task of {episode.id}"}
    messages = [asked, *([SAYS, {"role": "user", "content": "Go on."}] * number)]
    fields |= {"evidence": SessionEvidence(SessionSource.HEADER, str(episode.id)), "messages": messages}
    turn = turn_record(api_key_id=ApiKeyId(episode.id), episode_id=episode.id, response=SAYS, **fields)
    await learning.turns.insert(turn)


async def remove_newest(learning: PostgresLearning, episode: EpisodeBegun) -> None:
    """The newest whole turn of an episode, as if it had never been stored."""
    newest = "(SELECT max(id::text)::uuid FROM turns WHERE episode_id = %s AND status = 'complete')"
    later = "SELECT id FROM turns WHERE episode_id = %s AND status = 'aborted'"
    await learning.execute(f"DELETE FROM turns WHERE id IN ({later})", episode.id)
    await learning.execute(f"DELETE FROM turns WHERE id = {newest}", episode.id)


async def test_a_reply_that_was_never_stored_is_a_lost_turn(
    postgres_learning: PostgresLearning, connection: psycopg.Connection[Any]
) -> None:
    first, second = await played(postgres_learning, Ending.COMPLETED, Ending.COMPLETED)
    scored = scored_since(connection, LONG_AGO)
    assert scored == [Scored("tool-call", True, 2)] * 2
    assert turns_lost(scored, REPLIES) == 0
    assert places_since(connection, LONG_AGO) == {"places": 2, "attempts": 2, "lost": 0, "doubled": 0}
    await remove_newest(postgres_learning, first)
    # The request that was sent again, and is stored twice, does not stand for the one that is missing.
    assert turns_lost(scored_since(connection, LONG_AGO), REPLIES) == 1
    await remove_newest(postgres_learning, second)
    await remove_newest(postgres_learning, second)
    await remove_newest(postgres_learning, second)
    assert turns_lost(scored_since(connection, LONG_AGO), REPLIES) == 3
    assert scored_since(connection, datetime.now(UTC) + timedelta(days=1)) == []


async def test_an_agent_that_did_not_complete_may_have_had_fewer_replies(
    postgres_learning: PostgresLearning, connection: psycopg.Connection[Any]
) -> None:
    first, _ = await played(postgres_learning, Ending.TRUNCATED_TIME, Ending.COMPLETED)
    await remove_newest(postgres_learning, first)
    scored = scored_since(connection, LONG_AGO)
    assert sorted(one.replies for one in scored) == [1, 2]
    assert turns_lost(scored, REPLIES) == 0


def test_an_environment_without_an_episode_counts_none() -> None:
    scored = [Scored("tool-call", True, 1)] * 3
    assert count_by_environment(scored, ["tool-call", "vf_sums"]) == {"tool-call": 3, "vf_sums": 0}
