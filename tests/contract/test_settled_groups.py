"""What settling a rollout group makes of its turns, and how steps claim whole groups."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore, GroupState
from clawloop.core.contracts.training import BatchSample, SampleState, StepState
from clawloop.core.contracts.turns import Message, TurnOutcome
from clawloop.core.episodes.keys import KEY_LIFETIME, EpisodeKey, sign, verify
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import ApiKeyId, RolloutGroupId, SampleId
from clawloop.core.recipes.recipe import Gate
from clawloop.core.samples.decision import is_held_out
from db.episodes.groups import PostgresEpisodeStore
from db.invariants import violations
from db.judging.rejudging import PostgresRejudgeStore
from db.serving.keys import PostgresKeyStore
from db.sweep import PostgresSweepStore
from db.training.gate_checks import read_held_out
from db.turns.read import ConversationCache
from tests.contract.episodes import LIFETIME, add_turns, new_group, run_group, samples_of_group
from tests.contract.learning import POLICY, PostgresLearning, commit, publish, recipe, step, trained
from tests.records import turn_record


async def outcomes(learning: PostgresLearning, episode: object) -> list[tuple[str, str]]:
    query = "SELECT outcome, outcome_detail AS why FROM turns WHERE episode_id = %s ORDER BY id"
    return [(row["outcome"], row["why"]) for row in await learning.rows(query, episode)]


async def test_every_turn_of_an_episode_gets_its_advantage(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    result, episodes = await run_group(learning, [1, 0, 0, None], turns=2)
    assert (result.state, result.scored, result.samples) == (GroupState.SETTLED, 3, 6)
    samples = await samples_of_group(learning, result.id)
    by_episode = {e.id: [s["reward"] for s in samples if s["episode_id"] == e.id] for e in episodes}
    assert by_episode[episodes[0].id] == pytest.approx([2**0.5] * 2)
    assert by_episode[episodes[1].id] == by_episode[episodes[2].id] == pytest.approx([-(0.5**0.5)] * 2)
    assert by_episode[episodes[3].id] == []
    assert (await outcomes(learning, episodes[0].id))[0] == (
        "sampled",
        "reward 1, advantage +1.41 among 3 episodes",
    )
    assert (
        await outcomes(learning, episodes[3].id) == [("unjudged", "its episode has no reward: the verifier hung")] * 2
    )
    view = await PostgresEpisodeStore(learning.database).episode(episodes[0].id)
    assert view is not None
    assert view.advantage == pytest.approx(2**0.5)
    assert (view.turns, view.tokens) == (2, 4)
    assert await violations(learning.database) == []


async def test_a_held_out_group_is_never_trained_and_versions_are_compared_on_it(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe().model_copy(update={"gate": Gate(held_out=0.5)}))
    sides: dict[bool, RolloutGroupId] = {}
    while len(sides) < 2:  # each group is held out or not with even odds
        result, _ = await run_group(learning, [1, 0])
        assert (result.state, result.samples) == (GroupState.SETTLED, 2)
        sides[is_held_out(POLICY, result.id, 0.5)] = result.id
    for held_out, group in sides.items():
        found = await samples_of_group(learning, group)
        state = SampleState.HELD_OUT if held_out else SampleState.FRESH
        assert {sample["state"] for sample in found} == {state}
        query = """SELECT DISTINCT t.outcome, t.outcome_detail LIKE 'held out: reward %%' AS said FROM turns t
            JOIN samples s ON s.turn_id = t.id WHERE s.rollout_group_id = %s"""
        assert await learning.rows(query, group) == [
            {"outcome": "held_out" if held_out else "sampled", "said": held_out}
        ]

    async def read(connection: AsyncConnection) -> list[BatchSample]:
        later = datetime.now(UTC) + timedelta(minutes=1)
        return await read_held_out(connection, ConversationCache(), POLICY, later, Gate(held_out=0.5))

    compared = await learning.database.run(read)
    held = {row["id"] for row in await learning.rows("SELECT id FROM samples WHERE state = 'held_out'")}
    assert {sample.sample_id for sample in compared} == held
    assert {sample.reward for sample in compared} == {1.0, -1.0}
    assert await violations(learning.database) == []


async def test_equal_rewards_tell_the_difficulty_and_teach_nothing(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    result, episodes = await run_group(learning, [1, 1, 1])
    assert (result.state, result.mean_reward, result.samples) == (GroupState.SETTLED, 1.0, 0)
    assert (await outcomes(learning, episodes[0].id))[0][0] == TurnOutcome.UNDECIDED


async def test_a_turn_that_cannot_be_trained_says_why(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    for place, episode in enumerate(episodes):
        (turn,) = await add_turns(learning, episode, 1)
        if place == 0:
            sampling = '{"temperature": 1.0, "top_p": 0.9, "top_k": -1}'
            await learning.execute("UPDATE turns SET sampling = %s WHERE id = %s", sampling, turn.turn_id)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, float(place), ""))
    assert (await store.settle(group.id))[0].samples == 1
    assert await outcomes(learning, episodes[0].id) == [("not_trainable", "not trainable: top_p")]


async def test_turns_of_lost_attempts_and_after_the_end_are_not_trained(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    lost = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await add_turns(learning, lost, 1)
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE, "its worker died"))
    ran = []
    for place, attempt in ((0, 2), (1, 1)):
        episode = await store.begin_episode(group.id, place, attempt, LIFETIME)
        await add_turns(learning, episode, 1)
        await store.end_episode(EpisodeEnd(episode.id, Ending.AGENT_ERROR))
        await store.score_episode(EpisodeScore(episode.id, float(place), ""))
        await add_turns(learning, episode, 1)
        ran.append(episode.id)
    assert (await store.settle(group.id))[0].samples == 2
    assert await outcomes(learning, lost.id) == [("unjudged", "its episode was abandoned: its worker died")]
    assert (await outcomes(learning, ran[0]))[1] == ("side", "its episode had ended")
    # Turns that waited in a gateway's spool: of the first attempt while it ran, and of one whose key was still cached.
    (late, _) = await add_turns(learning, lost, 2)
    began = "UPDATE turns SET started_at = now() - interval '1 hour' WHERE id = %s"
    await learning.execute(began, late.turn_id)
    assert await store.end_late_turns() == 2
    assert await store.end_late_turns() == 0
    assert (await outcomes(learning, lost.id))[1:] == [
        ("unjudged", "stored after its rollout group was settled"),
        ("side", "its episode had ended"),
    ]
    assert await violations(learning.database) == []


ENDINGS = [ending for ending in Ending if ending is not Ending.INFRASTRUCTURE]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_episode_is_trained_however_it_ended(postgres_learning: PostgresLearning, ending: Ending) -> None:
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    for place in range(2):
        episode = await store.begin_episode(group.id, place, 1, LIFETIME)
        await add_turns(learning, episode, 1)
        await store.end_episode(EpisodeEnd(episode.id, ending))
        await store.score_episode(EpisodeScore(episode.id, float(place), ""))
    assert (await store.settle(group.id))[0].samples == 2
    assert [sample["reward"] for sample in await samples_of_group(learning, group.id)] == [-1.0, 1.0]


async def test_late_turns_end_without_a_deadlock_with_a_turn_that_is_stored(
    postgres_learning: PostgresLearning,
) -> None:
    """A gateway's transaction locks the session first, then a turn of it."""
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await store.settle(group.id)
    (turn,) = await add_turns(learning, episode, 1)
    locks = "SELECT count(*) AS waiting FROM pg_locks WHERE NOT granted"
    async with await psycopg.AsyncConnection.connect(learning.url) as gateway:
        query = "SELECT id FROM sessions WHERE id = (SELECT session_id FROM turns WHERE id = %s) FOR UPDATE"
        await gateway.execute(query, [turn.turn_id])
        ending = asyncio.create_task(store.end_late_turns())
        while (await learning.rows(locks))[0]["waiting"] == 0:
            await asyncio.sleep(0.02)
        await gateway.execute("UPDATE turns SET outcome_detail = 'stored' WHERE id = %s", [turn.turn_id])
    assert await ending == 1
    assert (await learning.rows("SELECT state FROM sessions"))[0]["state"] == "closed"


async def test_no_session_workflow_and_no_judge_gets_a_turn_of_an_episode(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    (turn,) = await add_turns(learning, episode, 1)
    sweep = PostgresSweepStore(learning.database)
    assert await sweep.pending_turns(timedelta(0), 10) == []
    assert await sweep.sessions_left_open(timedelta(0), 10) == []
    assert await PostgresRejudgeStore(learning.database).rejudge_facts(turn.turn_id) is None
    await store.settle(group.id)
    assert (await learning.rows("SELECT state FROM sessions"))[0]["state"] == "closed"


async def test_a_step_takes_whole_groups_and_no_chats(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe(batch_groups=2, batch_samples=2))
    first, _ = await run_group(learning, [1, 0], turns=2)
    assert not await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 1)).reason == "1 of 2 rollout groups"
    assert (await learning.steps.status(POLICY)).reason == "0 of 2 samples; 1 of 2 rollout groups"
    second, _ = await run_group(learning, [1, 0, 0])
    third, _ = await run_group(learning, [1, 0])
    assert await learning.work_waiting()
    chats = await learning.add_samples(2)
    assert (await learning.steps.claim(POLICY, 1)).samples == 7
    batch = await learning.steps.batch(POLICY, 1)
    claimed = {sample.sample_id for sample in batch.samples}
    assert claimed == {s["id"] for g in (first, second) for s in await samples_of_group(learning, g.id)}
    assert len({sample.episode for sample in batch.samples}) == 5
    assert await violations(learning.database) == []
    assert await commit(learning, batch, trained(batch)) is StepState.COMMITTED
    assert await violations(learning.database) == []
    # The chat's samples have waited less than the groups did, and are the next batch.
    assert (await learning.steps.claim(POLICY, 2)).samples == 2
    assert [(await learning.sample_result(chat))[0] for chat in chats] == [SampleState.CLAIMED] * 2
    assert {s["state"] for s in await samples_of_group(learning, third.id)} == {"fresh"}


async def test_a_group_expires_as_a_whole_by_its_oldest_turn(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    engine = await learning.add_engine("http://e0")
    await learning.set_recipe(recipe(batch_groups=1, group_staleness_versions=1))
    for n in (1, 2):
        await step(learning, n)
        await publish(learning, n, engine)
    stale, episodes = await run_group(learning, [1, 0], version=2)
    await learning.execute("UPDATE turns SET version = 0 WHERE episode_id = %s", episodes[1].id)
    assert (await learning.steps.claim(POLICY, 3)).state is None
    states = [(s["state"], s["reason"]) for s in await samples_of_group(learning, stale.id)]
    assert states == [("expired", "stale: its group's oldest turn is 2 versions apart, bound 1")] * 2
    fresh, _ = await run_group(learning, [1, 0], version=2)
    assert (await learning.steps.claim(POLICY, 3)).samples == 2
    (sample, _) = await samples_of_group(learning, fresh.id)
    assert (await learning.sample_result(SampleId(sample["id"])))[0] is SampleState.CLAIMED  # type: ignore[arg-type]


async def test_damage_is_found(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    result, episodes = await run_group(learning, [1, 0])
    await learning.execute(
        "UPDATE turns SET outcome = 'waiting', entered_at = now() - interval '1 hour' WHERE episode_id = %s",
        episodes[0].id,
    )
    await learning.execute("UPDATE api_keys SET revoked_at = NULL WHERE episode_id = %s", episodes[0].id)
    sample = (await samples_of_group(learning, result.id))[0]["id"]
    await learning.execute("UPDATE samples SET state = 'trained' WHERE id = %s", sample)
    found = {violation.invariant for violation in await violations(learning.database)}
    assert {
        "no turn waits for a rollout group that is settled",
        "the key of an episode that has ended is revoked",
        "a step takes all samples of a rollout group or none",
    } <= found


async def test_an_episodes_key_is_found_until_it_ends_or_expires(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store, keys = PostgresEpisodeStore(learning.database), PostgresKeyStore(learning.database)
    group = new_group(3)
    await store.make_group(group)
    first, second, third = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(3)]
    secret = await store.key_of(first.id)
    key = await keys.authenticate(secret)
    signed = verify(secret, await keys.signing_secret())
    assert key is not None
    assert signed is not None
    assert key.episode == signed.episode == first.id
    assert (key.policy, key.expires_at) == (signed.policy, signed.expires_at)
    await store.end_episode(EpisodeEnd(first.id, Ending.COMPLETED))
    assert await keys.authenticate(secret) is None
    expired = await store.key_of(second.id)
    await learning.execute("UPDATE api_keys SET expires_at = now() WHERE episode_id = %s", second.id)
    assert await keys.authenticate(expired) is None
    # It waited for a place until its key had ended: its agent, which starts now, has all of a key's time.
    renewed = await store.key_of(second.id)
    assert await store.key_of(second.id) == renewed
    again = await keys.authenticate(renewed)
    assert again is not None
    assert again.expires_at is not None
    assert again.expires_at > datetime.now(UTC) + KEY_LIFETIME - timedelta(minutes=5)
    forged = sign(EpisodeKey(third.id, "default", signed.expires_at), b"another secret")
    assert await keys.authenticate(forged) is None
    assert [entry.name for entry in await keys.list_keys()] == ["test"]


async def test_no_second_agent_gets_the_key_of_an_episode_that_has_turns(postgres_learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(postgres_learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await store.key_of(episode.id)
    await add_turns(postgres_learning, episode, 1)
    with pytest.raises(RecordUnusable, match="has turns already"):
        await store.key_of(episode.id)


async def test_turns_of_an_episode_after_an_image_give_no_sample(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    image: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    for place, episode in enumerate(episodes):
        await add_turns(learning, episode, 1)
        if place == 0:
            for content in ([image], [image, {"role": "user", "content": "more"}]):
                turn = turn_record(api_key_id=ApiKeyId(episode.id), episode_id=episode.id, messages=content)
                await learning.turns.insert(turn)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, 1 - place, ""))
    await store.settle(group.id)
    found = await outcomes(learning, episodes[0].id)
    assert [outcome for outcome, _ in found] == ["sampled", "not_trainable", "not_trainable"]
    assert all(why.startswith("not trainable: image in the prompt") for _, why in found[1:])


async def test_a_new_secret_signs_the_next_keys_and_those_handed_out_stay_valid(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    store, keys = PostgresEpisodeStore(learning.database), PostgresKeyStore(learning.database)
    group = new_group(3)
    await store.make_group(group)
    first, begun = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    handed_out, before = await store.key_of(first.id), await keys.signing_secret()
    await keys.drop_signing_secret()
    after = await keys.signing_secret()
    assert after != before
    assert await keys.authenticate(handed_out) is not None
    # One that began before and is handed out now.
    late = await store.key_of(begun.id)
    assert await keys.authenticate(late) is not None
    assert await store.key_of(begun.id) == late
    assert (verify(late, before), verify(late, after) is not None) == (None, True)
