"""Claims of batches: concurrent, killed, by group, by schedule."""

from __future__ import annotations

import asyncio
import inspect
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import Claim, SampleState, StepState, TrainingState
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.errors import RecordUnusable, StoreUnavailable
from clawloop.core.ids import FeedbackId, SampleId, new_feedback_id
from clawloop.core.judging.hints import NOT_ASKED, HintChoice
from clawloop.core.judging.records import FinalizedJudgement, Relation
from clawloop.core.judging.voting import Verdict, rated
from clawloop.core.recipes.recipe import Recipe, Train
from db.content import bytes_to_logprobs
from db.database import Database
from db.training import samples
from db.training.recipes import set_recipe
from db.training.steps import PostgresStepStore
from db.training.work_flag import PostgresWorkStore
from db.turns.sessions import PostgresSessionStore
from tests.conftest import execute
from tests.contract.conftest import TEST_LIMIT
from tests.contract.learning import POLICY, RECIPE, Learning, PostgresLearning, commit, recipe, step, trained
from tests.records import turn_record

# Concurrent claims, killed connections, damaged rows and re-judged samples, in PostgreSQL only.

KILL = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = 'clawloop' AND state <> 'idle' AND pid <> pg_backend_pid() AND datname = 'migrated'"""


@pytest.mark.slow
async def test_concurrent_claims_with_killed_connections_give_one_batch(
    postgres_learning: PostgresLearning, postgres_url: str
) -> None:
    await postgres_learning.set_recipe(recipe(batch_samples=16))
    samples = await postgres_learning.add_samples(40)
    databases = [Database(postgres_url, TEST_LIMIT) for _ in range(4)]
    stores = [PostgresStepStore(database) for database in databases]
    killed = 0

    async def claim(place: int) -> Claim:
        nonlocal killed
        while True:
            try:
                return await stores[place % 4].claim(POLICY, 1)
            except StoreUnavailable:
                killed += 1

    async def kill() -> None:
        await killer.execute(KILL)
        await asyncio.sleep(0.02)

    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as killer:
        with psycopg.connect(postgres_url) as holder:
            holder.execute("SELECT FROM policies FOR UPDATE")  # no claim ends before one was killed
            claims = asyncio.ensure_future(asyncio.gather(*(claim(place) for place in range(32))))
            async with asyncio.timeout(60):
                while not killed:
                    await kill()
        deadline = time.monotonic() + 1.5
        while not claims.done() and time.monotonic() < deadline:
            await kill()
    found = await claims
    for database in databases:
        await database.close()
    assert {(one.state, one.samples) for one in found} == {(StepState.CLAIMED, 16)}
    rows = await postgres_learning.rows("SELECT step, sample_id, place FROM step_samples ORDER BY place")
    assert [row["sample_id"] for row in rows] == samples[:16]
    assert {row["step"] for row in rows} == {1}
    states = await postgres_learning.rows("SELECT state, count(*) AS n FROM samples GROUP BY state ORDER BY state")
    assert [(row["state"], row["n"]) for row in states] == [("claimed", 16), ("fresh", 24)]


async def test_concurrent_claims_of_consecutive_steps_never_share_a_sample(postgres_learning: PostgresLearning) -> None:
    await postgres_learning.add_samples(12)
    store = postgres_learning.steps
    for n in (1, 2, 3):
        ends = await asyncio.gather(*(store.claim(POLICY, number) for number in (n, n, n + 1, n)))
        assert [end.state for end in ends] == [StepState.CLAIMED, StepState.CLAIMED, None, StepState.CLAIMED]
        batch = await store.batch(POLICY, n)
        await commit(postgres_learning, batch, trained(batch))
    rows = await postgres_learning.rows("SELECT count(*) AS n, count(DISTINCT sample_id) AS apart FROM step_samples")
    assert (rows[0]["n"], rows[0]["apart"]) == (12, 12)


async def test_chat_does_not_wait_for_a_claim(postgres_learning: PostgresLearning) -> None:
    await postgres_learning.add_samples(4)
    first = turn_record("s0", api_key_id=postgres_learning.key)
    evidence = SessionEvidence(SessionSource.HEADER, "s0")
    messages = [*first.messages, first.response or {}, {"role": "user", "content": "and now?"}]
    goes_on = turn_record(api_key_id=postgres_learning.key, evidence=evidence, messages=messages)
    begins = turn_record("another session", api_key_id=postgres_learning.key)

    async def claim(connection: AsyncConnection) -> Claim:
        claimed: Claim = await inspect.unwrap(PostgresStepStore.claim)(postgres_learning.steps, connection, POLICY, 1)
        # The claim holds all it will ever hold; a turn refers to the policy, and to the claimed turn it continues.
        for record in (begins, goes_on):
            await asyncio.wait_for(postgres_learning.turns.insert(record), 30)
        return claimed

    assert (await postgres_learning.database.run(claim)).state is StepState.CLAIMED
    stored = await postgres_learning.turns.load(goes_on.turn_id)
    assert stored is not None
    (claimed_turn,) = await postgres_learning.rows("SELECT turn_id FROM samples ORDER BY id LIMIT 1")
    assert stored.parent_turn_id == claimed_turn["turn_id"]


@pytest.mark.parametrize("moved", ["epoch = 1", "head = 1"])
async def test_a_commit_compares_head_and_epoch(postgres_learning: PostgresLearning, moved: str) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.execute("UPDATE policies SET head = 0")
    await postgres_learning.add_samples(4)
    await postgres_learning.steps.claim(POLICY, 2)
    batch = await postgres_learning.steps.batch(POLICY, 2)
    await postgres_learning.execute(f"UPDATE policies SET {moved}")
    assert await commit(postgres_learning, batch, trained(batch)) is StepState.ABANDONED
    assert (await postgres_learning.steps.status(POLICY)).ready == 4


async def test_a_sample_whose_grandparent_lost_tokens_is_dropped_from_the_batch(
    postgres_learning: PostgresLearning,
) -> None:
    samples = await postgres_learning.add_samples(4)
    rows = await postgres_learning.rows("SELECT turn_id FROM samples ORDER BY id")
    first, second, third, *_ = [row["turn_id"] for row in rows]
    for child, parent, shared in ((second, first, 9), (third, second, 14)):  # the first has 5 tokens of its own
        await postgres_learning.execute(
            "UPDATE turns SET prompt_shared = %s, parent_turn_id = %s WHERE id = %s", shared, parent, child
        )
    await postgres_learning.execute("UPDATE samples SET state = 'expired' WHERE turn_id = %s", second)
    await postgres_learning.set_recipe(recipe(batch_samples=3))
    store = PostgresStepStore(postgres_learning.database)
    assert (await store.claim(POLICY, 1)).samples == 3
    assert samples[2] not in [sample.sample_id for sample in (await store.batch(POLICY, 1)).samples]
    (row,) = await postgres_learning.rows("SELECT dropped FROM step_samples WHERE dropped IS NOT NULL")
    assert "its prompt is 14 tokens of its parent's and 3 more, but 13 are there" in row["dropped"]


def finalized(reward: float) -> FinalizedJudgement:
    return FinalizedJudgement(
        verdict=Verdict(1 if reward > 0 else -1, reward, reward, "rated"),
        hint=HintChoice((), answered=True, why="none"),
        not_trainable=None,
        reward=reward,
        hinted_prompts=(),
        outcome=TurnOutcome.SAMPLED,
        why=f"rated {reward:+g}",
    )


async def rate(learning: PostgresLearning, sample: SampleId) -> FeedbackId:
    given = new_feedback_id()
    await learning.execute(
        "INSERT INTO feedback (id, turn_id, api_key_id, score, effect) SELECT %s, turn_id, %s, -1, 'amends'"
        " FROM samples WHERE id = %s",
        given,
        learning.key,
        sample,
    )
    return given


async def test_feedback_during_a_claim_makes_another_sample(postgres_learning: PostgresLearning) -> None:
    sample, *_ = await postgres_learning.add_samples(4)
    (row,) = await postgres_learning.rows("SELECT turn_id, judgement_id FROM samples WHERE id = %s", sample)
    given = await rate(postgres_learning, sample)
    judgements = postgres_learning.judgements
    amended = await judgements.revise(row["turn_id"], None, b"e", "hint")
    assert amended.id == row["judgement_id"]
    await postgres_learning.steps.claim(POLICY, 1)
    with pytest.raises(StoreUnavailable, match="meanwhile"):
        await judgements.finalize(amended.id, finalized(-1), [given])
    further = await judgements.revise(row["turn_id"], None, b"e", "hint")
    assert further.id != amended.id
    await judgements.finalize(further.id, finalized(-1), [given])
    assert (await postgres_learning.sample_result(sample))[1:] == (TurnOutcome.SAMPLED, "rated -1")
    batch = await postgres_learning.steps.batch(POLICY, 1)
    assert [one.explicit for one in batch.samples] == [False] * 4
    await commit(postgres_learning, batch, trained(batch))
    # The newer sample still waits, and the turn shows that.
    assert await postgres_learning.sample_result(sample) == (SampleState.TRAINED, TurnOutcome.SAMPLED, "rated -1")
    (newer,) = await postgres_learning.rows("SELECT id FROM samples WHERE state = 'fresh'")
    await postgres_learning.set_recipe(recipe(batch_samples=1))
    await postgres_learning.steps.claim(POLICY, 2)
    assert [one.explicit for one in (await postgres_learning.steps.batch(POLICY, 2)).samples] == [True]
    assert newer["id"] == (await postgres_learning.steps.batch(POLICY, 2)).samples[0].sample_id


async def test_an_abandoned_step_frees_only_the_sample_of_the_latest_judgement(
    postgres_learning: PostgresLearning,
) -> None:
    sample, *_ = await postgres_learning.add_samples(4)
    (row,) = await postgres_learning.rows("SELECT turn_id FROM samples WHERE id = %s", sample)
    await postgres_learning.steps.claim(POLICY, 1)
    given = await rate(postgres_learning, sample)
    further = await postgres_learning.judgements.revise(row["turn_id"], None, b"e", "hint")
    await postgres_learning.judgements.finalize(further.id, finalized(-1), [given])
    await postgres_learning.steps.abandon(POLICY, 1, "the trainer is gone")
    assert (await postgres_learning.sample_result(sample))[0] is SampleState.SUPERSEDED
    (ready,) = await postgres_learning.rows("SELECT count(*) AS n FROM samples WHERE state = 'fresh'")
    assert ready["n"] == 4
    assert (await postgres_learning.sample_result(sample))[1:] == (TurnOutcome.SAMPLED, "rated -1")


async def test_only_the_judgement_that_fills_a_batch_reports_work(postgres_learning: PostgresLearning) -> None:
    await postgres_learning.add_samples(6)
    assert postgres_learning.woken == [None, None, None, POLICY, None, None]
    await postgres_learning.steps.claim(POLICY, 1)
    await postgres_learning.add_samples(2)
    assert postgres_learning.woken[6:] == [None, POLICY]


async def test_concurrent_judgements_report_work_once(postgres_learning: PostgresLearning) -> None:
    await postgres_learning.set_recipe(recipe(batch_samples=24))
    await asyncio.gather(*(postgres_learning.add_samples(3) for _ in range(8)))
    assert postgres_learning.woken.count(POLICY) == 1


async def test_work_without_a_recent_notification_is_pending(postgres_learning: PostgresLearning) -> None:
    work = PostgresWorkStore(postgres_learning.database)
    minute = timedelta(minutes=1)
    assert await work.pending_work(minute) == []
    await postgres_learning.add_samples(4)
    assert await work.pending_work(minute) == [POLICY]
    await work.mark_work_notified([POLICY])
    await postgres_learning.add_samples(1)  # no new batch: one was waiting before
    assert await work.pending_work(minute) == []
    await postgres_learning.execute("UPDATE policies SET work_signalled_at = work_signalled_at - interval '2 minutes'")
    assert await work.pending_work(minute) == [POLICY]
    await postgres_learning.steps.claim(POLICY, 1)
    assert await work.pending_work(minute) == []
    await postgres_learning.age(timedelta(hours=25))
    assert await work.pending_work(minute) == [POLICY]  # by waiting alone


async def test_work_is_pending_less_often_while_a_step_is_computed(postgres_learning: PostgresLearning) -> None:
    work = PostgresWorkStore(postgres_learning.database)
    minute = timedelta(minutes=1)
    await postgres_learning.add_samples(8)
    await postgres_learning.steps.claim(POLICY, 1)  # and the next batch waits already
    assert await work.pending_work(minute) == [POLICY]
    await work.mark_work_notified([POLICY])
    ago = "UPDATE policies SET work_signalled_at = now() - interval '{} minutes'"
    await postgres_learning.execute(ago.format(59))
    assert (
        await work.pending_work(minute) == []
    )  # the trainer may be down for weeks, and every signal stays in the history
    await postgres_learning.execute(ago.format(61))
    assert await work.pending_work(minute) == [POLICY]
    await postgres_learning.execute(ago.format(2))
    await postgres_learning.steps.abandon(POLICY, 1, "to be notified at once again")
    await postgres_learning.execute(ago.format(2))
    assert await work.pending_work(minute) == [POLICY]


async def test_a_locked_sample_is_skipped_and_claimed_later(
    postgres_learning: PostgresLearning, postgres_url: str
) -> None:
    await postgres_learning.add_samples(4)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT * FROM turns ORDER BY id LIMIT 1 FOR UPDATE")
        assert await postgres_learning.steps.claim(POLICY, 1) == Claim(POLICY, 1, None, 0, "3 of 4 samples")
    assert await postgres_learning.work_waiting()
    assert (await postgres_learning.steps.claim(POLICY, 1)).samples == 4


async def test_the_database_enforces_one_claimed_step_at_a_time(
    postgres_learning: PostgresLearning, postgres_url: str
) -> None:
    await postgres_learning.add_samples(4)
    await postgres_learning.steps.claim(POLICY, 1)
    with pytest.raises(psycopg.errors.UniqueViolation, match="steps_open_idx"):
        execute(
            postgres_url,
            "INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash)"
            f" VALUES ('default', 2, 0, 0, 'claimed', '{RECIPE.hash}')",
        )


async def test_an_activation_sends_a_notification(postgres_learning: PostgresLearning, postgres_url: str) -> None:
    engine = await postgres_learning.add_engine("http://e1:8100")
    await step(postgres_learning, 1)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("LISTEN clawloop_directory")
        await postgres_learning.publishing.loaded(engine, POLICY, 1)
        assert await postgres_learning.publishing.activate(POLICY, 1, 0)
        payloads = [one.payload async for one in connection.notifies(timeout=60, stop_after=1)]
    assert payloads == [POLICY]
    (row,) = await postgres_learning.rows("SELECT activated_at, retired_at FROM versions WHERE n = 1")
    assert row["activated_at"] is not None
    assert row["retired_at"] is None


async def test_operators_changes_are_recorded_as_events(postgres_learning: PostgresLearning) -> None:
    await postgres_learning.operators.pause(POLICY, "lunch")
    await postgres_learning.operators.resume(POLICY)
    await postgres_learning.operators.resume(POLICY)  # nothing to resume
    await step(postgres_learning, 1)
    await postgres_learning.operators.roll_back(POLICY, 0)
    await postgres_learning.operators.pin(POLICY, 1)
    rows = await postgres_learning.rows("SELECT kind, detail FROM events ORDER BY id")
    assert [(row["kind"], row["detail"]) for row in rows] == [
        ("paused", {"reason": "lunch"}),
        ("resumed", {"was": "lunch", "retried": 0}),
        ("version_accepted", {"version": 1, "parent": 0}),
        ("rolled_back", {"to": 0, "head": 1, "active": 0}),
        ("pinned", {"version": 1, "was": None}),
    ]


async def test_a_step_whose_parent_has_no_files_is_rejected(postgres_learning: PostgresLearning) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.add_samples(4, version=1)
    await postgres_learning.steps.claim(POLICY, 2)
    await postgres_learning.lose_files(1)
    with pytest.raises(RecordUnusable, match="version 1, from which step 2 begins"):
        await postgres_learning.steps.batch(POLICY, 2)


async def test_a_turn_shows_the_step_it_was_trained_in(postgres_learning: PostgresLearning) -> None:
    await step(postgres_learning, 1)
    batch = await step(postgres_learning, 2)
    (row,) = await postgres_learning.rows(
        "SELECT session_id FROM turns JOIN samples s ON s.turn_id = turns.id WHERE s.id = %s",
        batch.samples[0].sample_id,
    )
    (turn,) = await PostgresSessionStore(postgres_learning.database).turns(row["session_id"])
    assert (turn.outcome, turn.why, turn.step) == (TurnOutcome.TRAINED, "trained in step 2", 2)
    assert turn.sample is SampleState.TRAINED


# Claims of a recipe that compares groups, and after an operator has set another recipe.


def grouped(batch_samples: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "grouped",
            "signal": {"hints": False, "reward": "group"},
            "train": {"batch_samples": batch_samples, "advantage": {"teacher_weight": 0.0}},
        }
    )


async def add_group(learning: PostgresLearning, name: str, *rewards: float) -> list[SampleId]:
    """The samples of the responses to one prompt."""
    evidence = SessionEvidence(SessionSource.HEADER, name)
    turns = [turn_record(name, api_key_id=learning.key, evidence=evidence, choice=n) for n in range(len(rewards))]
    turns = [replace(turn, group_id=turns[0].turn_id) for turn in turns]
    for turn in turns:
        await learning.turns.insert(turn)
    for turn, reward in zip(turns, rewards, strict=True):
        opened = await learning.judgements.open(turn.turn_id, None, b"e", "hint")
        finalized = FinalizedJudgement(
            rated(reward), NOT_ASKED, None, reward, (), TurnOutcome.SAMPLED, "rated", Relation.GROUP
        )
        await learning.judgements.finalize(opened.id, finalized, [])
    query = "SELECT s.id FROM samples s JOIN turns t ON t.id = s.turn_id WHERE t.group_id = %s ORDER BY s.id"
    return [SampleId(row["id"]) for row in await learning.rows(query, turns[0].turn_id)]


async def test_a_group_is_claimed_as_a_whole(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(grouped(4))
    first = await add_group(learning, "a", 1, -1, 1)
    second = await add_group(learning, "b", -1, 1, 1)
    third = await add_group(learning, "c", 1, -1)
    assert (await learning.steps.claim(POLICY, 1)).samples == 6
    batch = await learning.steps.batch(POLICY, 1)
    assert [sample.sample_id for sample in batch.samples] == [*first, *second]
    assert [round(sample.reward or 0, 2) for sample in batch.samples] == [0.71, -1.41, 0.71, -1.41, 0.71, 0.71]
    assert [(await learning.sample_result(sample))[0] for sample in third] == [SampleState.FRESH] * 2


async def test_a_group_with_a_locked_turn_waits_as_a_whole(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(grouped(2))
    (_, locked, _) = await add_group(learning, "a", 1, -1, 1)
    other = await add_group(learning, "b", 1, -1)
    async with await psycopg.AsyncConnection.connect(learning.url) as connection:
        lock = "SELECT 1 FROM turns t JOIN samples s ON s.turn_id = t.id WHERE s.id = %s FOR UPDATE OF t"
        await connection.execute(lock, [locked])
        assert (await learning.steps.claim(POLICY, 1)).state is None
        await connection.rollback()
    assert (await learning.steps.claim(POLICY, 1)).samples == 3
    assert [(await learning.sample_result(sample))[0] for sample in other] == [SampleState.FRESH] * 2


async def test_an_operators_recipe_keeps_samples_of_the_same_signal_and_lets_the_others_expire(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    samples = await learning.add_samples(4)
    await set_recipe(learning.database, POLICY, recipe(batch_samples=4, drift=0.5))
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 4)
    await learning.steps.abandon(POLICY, 1, "the trainer is gone")
    await set_recipe(learning.database, POLICY, Recipe.model_validate({"name": "small", "signal": {"votes": "direct"}}))
    assert (await learning.steps.claim(POLICY, 2)).state is None
    changed = (SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")
    assert [await learning.sample_result(sample) for sample in samples] == [changed] * 4


# A recipe's schedule keeps batches from being claimed, and says until when.


def scheduled(**keys: object) -> Recipe:
    return recipe(schedule=keys)


def hours_from_now(begin: int, end: int) -> str:
    now = datetime.now(UTC)
    first, last = ((now + timedelta(hours=hours)).strftime("%H:00") for hours in (begin, end))
    return f"{first}-{last}"


async def test_outside_of_its_hours_a_full_batch_waits(learning: Learning) -> None:
    await learning.operators.set_recipe(POLICY, scheduled(hours=hours_from_now(3, 6)))
    await learning.add_samples(4)
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason[:20]) == (None, "outside of its hours")
    view = await learning.steps.status(POLICY)
    assert view.state is TrainingState.WAITING
    assert view.reason == f"{claim.reason}; 4 of 4 samples for the next step"
    assert view.closed_seconds is not None
    assert 2 * 3600 - 60 < view.closed_seconds <= 3 * 3600
    assert await learning.work_waiting()


async def test_within_its_hours_it_is_claimed(learning: Learning) -> None:
    await learning.operators.set_recipe(POLICY, scheduled(hours=hours_from_now(-3, 3)))
    await learning.add_samples(4)
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    assert (await learning.steps.status(POLICY)).closed_seconds is None


async def test_no_more_versions_a_day_than_the_schedule_has(learning: Learning) -> None:
    # Where it is noon now: a day does not end while the test runs.
    zone = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"
    await learning.operators.set_recipe(POLICY, scheduled(versions_a_day=1, time_zone=zone))
    await step(learning, 1)
    await learning.add_samples(4, version=1)
    refused = await learning.steps.claim(POLICY, 2)
    assert refused == Claim(POLICY, 2, None, 0, refused.reason)
    assert refused.reason.startswith(f"1 version was made today ({zone}), 1 at most, until ")
    await learning.age(timedelta(days=1))
    assert (await learning.steps.claim(POLICY, 2)).state is StepState.CLAIMED


async def test_what_a_policy_began_from_was_not_made_today(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    zone = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"
    await step(learning, 1)
    await learning.operators.create_policy("anna", POLICY, scheduled(versions_a_day=1, time_zone=zone), 1)
    assert (await learning.steps.status("anna")).closed_seconds is None
    await learning.operators.set_recipe(POLICY, scheduled(versions_a_day=1, time_zone=zone))
    assert (await learning.steps.status(POLICY)).closed_seconds is not None


async def test_while_replies_are_slow_no_batch_is_claimed(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    slow = "UPDATE turns SET finished_at = now(), started_at = now() - %s"
    await learning.execute(slow, timedelta(seconds=9))
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason) == (None, "replies take 9.0 s (p95 of 5 minutes), 2 s at most")
    assert (await learning.steps.status(POLICY)).closed_seconds == 60
    await learning.execute(slow, timedelta(seconds=1))
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_slow_agents_of_episodes_and_side_turns_hold_up_no_training(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    await learning.execute("UPDATE turns SET kind = 'side', finished_at = now(), started_at = now() - interval '9 s'")
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_replies_of_a_while_ago_do_not_count(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    await learning.execute(
        "UPDATE turns SET finished_at = now() - interval '6 min', started_at = now() - interval '1 h'"
    )
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


# Samples that cannot be trained expire or are dropped; the others of their batch are trained.


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE turns SET logprobs = NULL", "log-probs are unknown"),
        ("UPDATE turns SET response_ids = NULL, logprobs = NULL", "0 response ids"),
        ("UPDATE turns SET prompt_ids = NULL, prompt_shared = NULL", "0 prompt and"),
        ("""UPDATE turns SET sampling = '{"top_p": 1}'""", "temperature None"),
        ("UPDATE turns SET outcome = 'erased'", "its turn was erased"),
    ],
)
async def test_an_unusable_sample_expires_and_the_claim_continues(
    postgres_learning: PostgresLearning, damage: str, fault: str
) -> None:
    bad, *_ = await postgres_learning.add_samples(5)
    turn = (await postgres_learning.rows("SELECT turn_id FROM samples WHERE id = %s", bad))[0]["turn_id"]
    await postgres_learning.execute(f"{damage} WHERE id = %s", turn)
    claim = await PostgresStepStore(postgres_learning.database).claim(POLICY, 1)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 4)
    state, outcome, _ = await postgres_learning.sample_result(bad)
    reason = (await postgres_learning.rows("SELECT reason FROM samples WHERE id = %s", bad))[0]["reason"]
    assert state is SampleState.EXPIRED
    assert outcome is (TurnOutcome.ERASED if "erased" in fault else TurnOutcome.EXPIRED)
    assert fault in reason
    assert "erased" in fault or str(turn) in reason


async def test_a_sample_erased_after_the_claim_is_dropped(postgres_learning: PostgresLearning) -> None:
    erased, *_ = await postgres_learning.add_samples(4)
    store = postgres_learning.steps
    await store.claim(POLICY, 1)
    await postgres_learning.execute(
        "UPDATE turns SET outcome = 'erased', outcome_detail = 'asked for' WHERE id ="
        " (SELECT turn_id FROM samples WHERE id = %s)",
        erased,
    )
    batch = await store.batch(POLICY, 1)
    assert len(batch.samples) == 3
    assert await commit(postgres_learning, batch, trained(batch)) is StepState.COMMITTED
    assert await postgres_learning.sample_result(erased) == (SampleState.EXPIRED, TurnOutcome.ERASED, "asked for")


async def test_a_sample_damaged_after_the_claim_is_dropped_and_the_others_are_trained(
    postgres_learning: PostgresLearning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CHECK refuses log-probs of a wrong length, so only damage on disk can make them; so decoding fails here."""
    damaged, *_ = await postgres_learning.add_samples(4)
    await postgres_learning.steps.claim(POLICY, 1)
    faults = iter([RecordUnusable("3 bytes of log-probs for 2 tokens")])

    def decode(stored: bytes, count: int) -> list[float]:
        if (fault := next(faults, None)) is not None:
            raise fault
        return bytes_to_logprobs(stored, count)

    monkeypatch.setattr(samples, "bytes_to_logprobs", decode)
    batch = await postgres_learning.steps.batch(POLICY, 1)
    assert len(batch.samples) == 3
    assert damaged not in {sample.sample_id for sample in batch.samples}
    assert await commit(postgres_learning, batch, trained(batch)) is StepState.COMMITTED


async def test_a_prompt_whose_parent_lost_tokens_is_detected(postgres_learning: PostgresLearning) -> None:
    (sample, *_) = await postgres_learning.add_samples(5)
    await postgres_learning.execute(
        "UPDATE turns SET prompt_shared = 9, parent_turn_id = (SELECT min(id::text)::uuid FROM turns) WHERE id ="
        " (SELECT turn_id FROM samples ORDER BY id DESC LIMIT 1)"
    )
    await PostgresStepStore(postgres_learning.database).claim(POLICY, 1)
    assert (await postgres_learning.sample_result(sample))[0] is SampleState.CLAIMED
    await postgres_learning.steps.abandon(POLICY, 1, "to claim the last one")
    await postgres_learning.set_recipe(recipe(batch_samples=5))
    claim = await PostgresStepStore(postgres_learning.database).claim(POLICY, 2)
    assert claim.state is None
    (row,) = await postgres_learning.rows("SELECT reason FROM samples WHERE state = 'expired'")
    assert "its prompt is 9 tokens of its parent's and 3 more, but 8 are there" in row["reason"]


# Nothing to correct ---------------------------------------------------------------------------------------------------


async def test_a_batch_of_praise_alone_makes_no_step_and_says_so(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe(corrected_share=0.5))
    praised = await learning.add_samples(8)
    assert (await learning.steps.claim(POLICY, 1)).state is None
    for sample in praised:
        assert await learning.sample_result(sample) == (
            SampleState.EXPIRED,
            TurnOutcome.EXPIRED,
            "nothing to correct: 0 of 4 samples blamed or hinted, 0.5 of them are needed (train.corrected_share)",
        )
    assert not await learning.work_waiting()


async def test_what_corrects_waits_until_it_is_enough_of_a_batch(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe(corrected_share=0.5))
    (blamed,) = await learning.add_samples(1, reward=-1.0)
    used_up = await learning.add_samples(3)
    assert (await learning.steps.claim(POLICY, 1)).state is None
    assert (await learning.sample_result(blamed))[0] is SampleState.FRESH
    assert {(await learning.sample_result(sample))[0] for sample in used_up} == {SampleState.EXPIRED}
    praised = await learning.add_samples(2)
    (hinted,) = await learning.add_samples(1, hinted=[1, 2, 3])
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, 1)
    assert {sample.sample_id for sample in batch.samples} == {blamed, hinted, *praised}


BY_MESSAGE = Recipe.model_validate(
    {
        "name": "message",
        "signal": {"verdicts": False, "hints_from": "message", "at_least_one": False},
        "train": recipe(corrected_share=0.25).train.model_dump(),
    }
)


async def test_blame_counts_where_only_the_message_teaches(postgres_learning: PostgresLearning) -> None:
    unrewarded = BY_MESSAGE.train.model_dump() | {"advantage": {"verdict_weight": 0.0}, "corrected_share": 0.25}
    learning = postgres_learning
    await learning.set_recipe(BY_MESSAGE.model_copy(update={"train": Train.model_validate(unrewarded)}))
    await learning.add_samples(4, reward=-1.0, hinted=[1, 2, 3])
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_of_next_messages_only_ratings_say_that_nothing_is_to_correct(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    await learning.set_recipe(BY_MESSAGE)
    liked = await learning.add_samples(2)
    followed = await learning.add_samples(2, reward=None, hinted=[1, 2, 3])
    assert (await learning.steps.claim(POLICY, 1)).state is None
    for sample in (*liked, *followed):
        assert await learning.sample_result(sample) == (
            SampleState.EXPIRED,
            TurnOutcome.EXPIRED,
            "nothing to correct: 0 of 2 rated replies blamed, 0.25 of them are needed (train.corrected_share)",
        )


@pytest.mark.parametrize(("liked", "blamed"), [(0, 0), (1, 0), (2, 1), (0, 1)])
async def test_a_batch_of_next_messages_is_trained_unless_those_who_rate_are_content(
    postgres_learning: PostgresLearning, liked: int, blamed: int
) -> None:
    learning = postgres_learning
    await learning.set_recipe(BY_MESSAGE)
    await learning.add_samples(liked)
    await learning.add_samples(blamed, reward=-1.0, hinted=[1, 2, 3])
    await learning.add_samples(4 - liked - blamed, reward=None, hinted=[1, 2, 3])
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_a_little_praise_that_waited_long_is_no_batch_either(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.set_recipe(recipe(corrected_share=0.5))
    praised = await learning.add_samples(2)
    (blamed,) = await learning.add_samples(1, reward=-1.0)
    await learning.age(timedelta(hours=25))
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, 1)
    assert [sample.sample_id for sample in batch.samples] == [blamed]
    assert {(await learning.sample_result(sample))[0] for sample in praised} == {SampleState.EXPIRED}
