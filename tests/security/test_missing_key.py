"""A worker whose file lacks a newer key leaves what it cannot read, says which key it lacks, and goes on with it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.training.train_step import LOST_ATTEMPTS, TrainingActivities, TrainStep
from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore, GroupState
from clawloop.core.contracts.training import SampleState
from clawloop.core.encryption.key_file import SETTING, add_key
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import EncryptionKeyMissing, TransientError
from db.content import ContentCodec
from db.database import Database
from db.episodes.groups import PostgresEpisodeStore
from db.training.steps import PostgresStepStore
from tests.contract.conftest import TEST_LIMIT
from tests.contract.episodes import LIFETIME, add_turns, new_group
from tests.contract.learning import POLICY, PostgresLearning, recipe
from tests.fakes.trainer import FakeTrainer
from tests.security.encrypted import codec, opened

LACKS = f"is encrypted with key [0-9a-f]{{10}}, which the file of {SETTING} lacks"


@pytest.fixture
async def behind(postgres_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    """Of a worker that reads a copy of the file from before a key was added."""
    codec(tmp_path)
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    database = Database(postgres_url, TEST_LIMIT, ContentCodec(Sealer(tmp_path / "copy")))
    async with opened(postgres_url, codec(tmp_path)) as first:
        await first.compare_keys()
    await database.compare_keys()
    add_key(tmp_path / "keys")
    yield database
    await database.close()


@pytest.fixture
async def ahead(postgres_url: str, tmp_path: Path, behind: Database) -> AsyncIterator[PostgresLearning]:
    """Of processes that encrypt by the new key."""
    learning = await PostgresLearning.on(postgres_url, Database(postgres_url, TEST_LIMIT, codec(tmp_path)))
    yield learning
    await learning.database.close()


async def test_samples_stay_fresh_until_the_key_is_there(
    ahead: PostgresLearning, behind: Database, tmp_path: Path
) -> None:
    await ahead.set_recipe(recipe(batch_samples=2))
    samples = await ahead.add_samples(2)
    steps = PostgresStepStore(behind)
    with pytest.raises(EncryptionKeyMissing, match=LACKS) as raised:
        await steps.claim(POLICY, 1)
    assert isinstance(raised.value, TransientError)
    assert await states(ahead) == [SampleState.FRESH] * 2
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    await steps.claim(POLICY, 1)
    assert await states(ahead) == [SampleState.CLAIMED] * 2
    assert {sample.sample_id for sample in (await steps.batch(POLICY, 1)).samples} == set(samples)


async def test_a_claimed_batch_waits_for_the_key(ahead: PostgresLearning, behind: Database) -> None:
    await ahead.set_recipe(recipe(batch_samples=2))
    await ahead.add_samples(2)
    await ahead.steps.claim(POLICY, 1)
    with pytest.raises(EncryptionKeyMissing, match=LACKS):
        await PostgresStepStore(behind).batch(POLICY, 1)
    # Attempts that read nothing do not count as lost, which would pause training.
    training = TrainingActivities(PostgresStepStore(behind), FakeTrainer())
    for _ in range(LOST_ATTEMPTS + 1):
        with pytest.raises(EncryptionKeyMissing, match=LACKS):
            await training.train_step(TrainStep(policy=POLICY, n=1))
    assert await states(ahead) == [SampleState.CLAIMED] * 2


async def test_a_group_is_not_settled_without_the_key(
    ahead: PostgresLearning, behind: Database, tmp_path: Path
) -> None:
    groups, without = PostgresEpisodeStore(ahead.database), PostgresEpisodeStore(behind)
    group = new_group(2)
    await groups.make_group(group)
    for place in range(2):
        episode = await groups.begin_episode(group.id, place, 1, LIFETIME)
        await add_turns(ahead, episode, 1)
        await groups.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await groups.score_episode(EpisodeScore(episode.id, float(place), ""))
    with pytest.raises(EncryptionKeyMissing, match=LACKS):
        await without.settle(group.id)
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    result, _ = await without.settle(group.id)
    assert (result.state, result.samples) == (GroupState.SETTLED, 2)


async def states(learning: PostgresLearning) -> list[object]:
    return [row["state"] for row in await learning.rows("SELECT state FROM samples WHERE policy = %s", POLICY)]
