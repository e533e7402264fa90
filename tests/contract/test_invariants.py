"""The invariants hold after many steps, and every kind of damage is a violation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.processes.operations import damaged_files
from clawloop.core.adapters.directory import HASHED_FILES, adapter_sha256
from clawloop.core.contracts.training import StepState
from clawloop.core.ids import TurnId
from db.database import Database
from db.erasure import PostgresErasureStore
from db.invariants import INVARIANTS, Violation, committed_versions, violations
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.contract.conftest import TEST_LIMIT
from tests.contract.episodes import run_group
from tests.contract.learning import POLICY, PostgresLearning, commit, publish, reject, step, trained
from tests.records import turn_record
from tests.verbs import clawloop, clawloop_process


@pytest.fixture(scope="module")
async def used_url(postgres_server: EmbeddedPostgres) -> str:
    """A database that each test copies: a copy takes a tenth of the time that making it takes."""
    execute(postgres_server.url, "CREATE DATABASE used")
    url = database_address(postgres_server.url, "used")
    await asyncio.to_thread(migrate, url)
    database = Database(url, TEST_LIMIT)
    await use(await PostgresLearning.on(url, database))
    await database.close()
    return url


@pytest.fixture
async def used(postgres_server: EmbeddedPostgres, used_url: str) -> AsyncIterator[PostgresLearning]:
    """Steps of each kind: accepted, rolled back, quarantined, rejected, and a candidate; a closed session."""
    execute(postgres_server.url, "CREATE DATABASE damaged TEMPLATE used")
    url = database_address(postgres_server.url, "damaged")
    database = Database(url, TEST_LIMIT)
    yield await PostgresLearning.on(url, database)
    await database.close()
    execute(postgres_server.url, "DROP DATABASE damaged WITH (FORCE)")


async def use(postgres_learning: PostgresLearning) -> None:
    engine = await postgres_learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(postgres_learning, n)
    await publish(postgres_learning, 2, engine)
    await postgres_learning.operators.roll_back(POLICY, 1)
    await publish(postgres_learning, 1, engine)
    await step(postgres_learning, 3)
    await publish(postgres_learning, 3, engine)
    await postgres_learning.operators.create_policy("another", POLICY, None, 3)
    await postgres_learning.add_samples(8, version=3)
    await postgres_learning.steps.claim(POLICY, 4)
    await postgres_learning.steps.quarantine(POLICY, 4, "not finite")
    await postgres_learning.operators.resume(POLICY)
    await reject(postgres_learning, 5, count=0)
    await postgres_learning.add_samples(4, version=3)
    await postgres_learning.steps.claim(POLICY, 6)
    batch = await postgres_learning.steps.batch(POLICY, 6)
    await postgres_learning.steps.commit(batch, trained(batch))
    await run_group(postgres_learning, [1, 0], version=3)
    await postgres_learning.execute("UPDATE sessions SET state = 'closed'")
    await postgres_learning.turns.insert(turn_record("open", api_key_id=postgres_learning.key))
    # Turns of tests begin when their version is made; a version answers later.
    await postgres_learning.execute("UPDATE versions SET created_at = created_at - interval '1 hour'")


async def test_no_invariant_is_violated_after_many_steps(used: PostgresLearning) -> None:
    assert await violations(used.database) == []


DAMAGE: dict[str, tuple[str, ...]] = {
    "every main turn of a closed session has an outcome": (
        "UPDATE turns SET outcome = 'waiting' WHERE id = (SELECT turn_id FROM samples ORDER BY id LIMIT 1)",
    ),
    "no turn waits for a day in a session that its client ended": (
        "UPDATE sessions SET state = 'ending', last_turn_at = now() - interval '25 hours'",
        "UPDATE turns SET outcome = 'waiting', announced_at = now() - interval '25 hours',"
        " entered_at = now() - interval '25 hours'"
        " WHERE id = (SELECT turn_id FROM samples ORDER BY id LIMIT 1)",
    ),
    "an erased turn has no content": (
        "UPDATE turns SET outcome = 'erased' WHERE id = (SELECT turn_id FROM samples ORDER BY id LIMIT 1)",
    ),
    "an erased lesson is in no prompt": (
        "INSERT INTO lessons (id, policy, text, state, why, source)"
        " SELECT gen_random_uuid(), id, '', 'erased', 'forgotten', 'typed' FROM policies LIMIT 1",
        "UPDATE turns SET lessons = ARRAY(SELECT id FROM lessons)",
    ),
    "a turn that was answered with lessons has no sample": ("UPDATE turns SET lessons = ARRAY[gen_random_uuid()]",),
    "a practice turn has a sample by its lessons alone, or measures one, of a main turn that is erased with it": (
        "UPDATE turns SET kind = 'practice' WHERE id = (SELECT turn_id FROM samples ORDER BY id LIMIT 1)",
    ),
    "no request is practised that a lesson is measured by": (
        "INSERT INTO lessons (id, policy, text, digest, state, why, source)"
        " SELECT gen_random_uuid(), id, 'Be short.', '', 'active', 'typed', 'typed' FROM policies LIMIT 1",
        "INSERT INTO practice (source_turn_id, lessons, turn_id, why)"
        " SELECT min(id::text)::uuid, '{}', min(id::text)::uuid, 'practised' FROM turns",
        "INSERT INTO yardstick (lesson_id, source_turn_id, turn_id, why, without)"
        " SELECT (SELECT id FROM lessons), min(id::text)::uuid, min(id::text)::uuid, 'measures', '{}' FROM turns",
    ),
    "a forgotten lesson leaves no hint that it was made of": (
        "UPDATE judgements SET hint = 'Be short.'",
        "INSERT INTO lessons (id, policy, text, state, why, source, turn_id)"
        " SELECT gen_random_uuid(), 'default', '', 'erased', 'forgotten', 'hint', turn_id FROM judgements"
        " WHERE decided_at IS NOT NULL LIMIT 1",
    ),
    "a lesson is erased with the turns that it came from": (
        "INSERT INTO lessons (id, policy, text, digest, state, why, source, turn_id)"
        " SELECT gen_random_uuid(), 'default', 'Be short.', '', 'active', 'hint', 'hint', id FROM turns LIMIT 1",
        "UPDATE turns SET outcome = 'erased' WHERE id = (SELECT turn_id FROM lessons)",
    ),
    "a file is there as long as a turn refers to it": (
        "INSERT INTO files (id, digest, size_bytes, content) VALUES (gen_random_uuid(), 'digest', 4, 'file')",
    ),
    "every turn names a version that existed when it began": (
        "UPDATE turns SET version = 9 WHERE id = (SELECT turn_id FROM samples ORDER BY id LIMIT 1)",
    ),
    "no sample is twice on the path from a version to the base": (
        "INSERT INTO step_samples SELECT policy, 3, sample_id, 99, NULL FROM step_samples WHERE step = 1 AND place = 0",
    ),
    "every trained sample has a verdict, a hint, the next message, a rating, an outcome or lessons": (
        "UPDATE judgements SET verdict = NULL WHERE id ="
        " (SELECT judgement_id FROM samples WHERE state = 'trained' LIMIT 1)",
    ),
    # Two judgements of one turn, of which both were trained.
    "a turn is trained once by one recipe, and once more after feedback": (
        "UPDATE judgements SET revision = 1, turn_id ="
        " (SELECT turn_id FROM samples WHERE state = 'trained' ORDER BY id LIMIT 1)"
        " WHERE id = (SELECT judgement_id FROM samples WHERE state = 'trained' ORDER BY id DESC LIMIT 1)",
        "UPDATE samples s SET turn_id = j.turn_id FROM judgements j WHERE j.id = s.judgement_id",
    ),
    "a sample is claimed or trained exactly if a step has it": (
        "UPDATE samples SET state = 'fresh' WHERE id = (SELECT id FROM samples WHERE state = 'trained' LIMIT 1)",
    ),
    "no turn waits for a rollout group that is settled": (
        "UPDATE turns SET outcome = 'waiting', entered_at = now() - interval '11 minutes' WHERE id ="
        " (SELECT turn_id FROM samples WHERE rollout_group_id IS NOT NULL LIMIT 1)",
    ),
    "the key of an episode that has ended is revoked": ("UPDATE api_keys SET revoked_at = NULL",),
    "a step takes all samples of a rollout group or none": (
        "UPDATE samples SET state = 'trained' WHERE id ="
        " (SELECT id FROM samples WHERE rollout_group_id IS NOT NULL LIMIT 1)",
    ),
    "no step trains a held-out sample": (
        "UPDATE samples SET state = 'held_out' WHERE id = (SELECT id FROM samples WHERE state = 'trained' LIMIT 1)",
    ),
    "a committed step's version exists": (
        "UPDATE steps SET state = 'committed' WHERE n = 4",
        "UPDATE samples SET state = 'trained' WHERE state = 'quarantined'",
    ),
    "a candidate has files and was made from the head of this epoch": ("UPDATE policies SET epoch = epoch + 1",),
    "no version answers, and none is trained on, that the gate has not accepted": ("UPDATE policies SET head = 5",),
    "a version that began as another policy's has the files of it": (
        "UPDATE versions SET path = 'another/v1-0123456789ab' WHERE origin_n = 3",
    ),
    "a rejected version has a failed check and a reason": ("DELETE FROM gate_checks",),
    "head, active and pinned versions exist and have files": ("UPDATE versions SET removed_at = now() WHERE n = 3",),
    "a canary is the head, and an accepted version": (
        "UPDATE policies SET canary = 1, canary_share = 0.1, canary_since = now()",
    ),
    "the active version is loaded where requests go": ("DELETE FROM engine_versions WHERE version = 3",),
    "a policy with a full batch, and not paused, is known to have work": (
        "UPDATE steps SET state = 'abandoned', finished_at = now() WHERE n = 6",
        "UPDATE samples SET state = 'fresh' WHERE state = 'claimed'",
        "UPDATE policies SET work_waiting = false",
    ),
}


def test_every_invariant_has_a_planted_violation() -> None:
    assert DAMAGE.keys() == INVARIANTS.keys()


@pytest.mark.parametrize("invariant", DAMAGE)
async def test_a_violation_is_reported_with_its_row(used: PostgresLearning, invariant: str) -> None:
    for statement in DAMAGE[invariant]:
        await used.execute(statement)
    found = await violations(used.database)
    seen = [violation.row for violation in found if violation.invariant == invariant]
    assert seen
    assert all(len(row) > 4 for row in seen)


@pytest.mark.parametrize(
    "left",
    [
        "UPDATE turns SET outcome = 'sampled' WHERE id = :turn",
        'UPDATE turns SET messages_added = \'[{"role": "user"}]\' WHERE id = :turn',
        "UPDATE turns SET error = 'the engine said' WHERE id = :turn",
        "UPDATE turns SET evidence = jsonb_set(evidence::jsonb, '{value}', '\"name\"')::json WHERE id = :turn",
        "INSERT INTO feedback (id, turn_id, api_key_id, text, effect)"
        " SELECT gen_random_uuid(), :turn, api_key_id, 'too long', 'amends' FROM sessions LIMIT 1",
        "INSERT INTO votes (judgement_id, kind, index, raw) SELECT id, 'sampled', 9, '1' FROM judgements"
        " WHERE turn_id = :turn",
        "INSERT INTO hints (judgement_id, kind, index, raw) SELECT id, 'hint', 9, 'hint' FROM judgements"
        " WHERE turn_id = :turn",
        "UPDATE judgements SET hint = 'Be brief.' WHERE turn_id = :turn",
        "UPDATE samples SET hinted_prompts = decode('01000000', 'hex') WHERE turn_id = :turn",
        "UPDATE turns SET reply_digest = decode(repeat('00', 32), 'hex') WHERE id = :turn",
        "UPDATE turns SET asked_digest = decode(repeat('00', 32), 'hex') WHERE id = :turn",
        # The turn was a next state, by which another one was judged.
        "INSERT INTO hints (judgement_id, kind, index, raw) SELECT id, 'hint', 9, 'hint' FROM judgements"
        " WHERE turn_id <> :turn LIMIT 1;"
        " UPDATE judgements SET shown_by = :turn WHERE id IN (SELECT judgement_id FROM hints WHERE index = 9)",
    ],
)
async def test_content_that_an_erasure_left_anywhere_is_a_violation(used: PostgresLearning, left: str) -> None:
    with psycopg.connect(used.url) as connection:
        found = connection.execute("SELECT turn_id FROM samples ORDER BY id LIMIT 1").fetchone()
    assert found is not None
    turn = TurnId(found[0])
    assert await PostgresErasureStore(used.database).erase_turn(turn) is not None
    assert await violations(used.database) == []
    await used.execute(left.replace(":turn", f"'{turn}'"))
    assert Violation("an erased turn has no content", f"turn {turn}") in await violations(used.database)


async def test_rollout_groups_of_a_full_batch_that_nobody_knows_of_are_a_violation(used: PostgresLearning) -> None:
    """By the recipe's number of groups."""

    async def found(batch_groups: int) -> list[str]:
        content = f"jsonb_set(content::jsonb, '{{train,batch_groups}}', '{batch_groups}')::json"
        await used.execute(f"UPDATE recipes SET content = {content}")
        await used.execute("UPDATE policies SET work_waiting = false")
        return [violation.row for violation in await violations(used.database)]

    await used.execute("UPDATE steps SET state = 'abandoned', finished_at = now() WHERE n = 6")
    await used.execute("UPDATE samples SET state = 'expired' WHERE state = 'claimed'")
    [*_, (last, _)] = [await run_group(used, [1, 0], version=3) for _ in range(7)]  # one is there
    violation = f"policy {POLICY}, 0 samples of chats, 8 rollout groups"
    assert (await found(9), await found(8)) == ([], [violation])
    await used.execute(f"UPDATE samples SET state = 'expired' WHERE rollout_group_id = '{last.id}'")
    assert (await found(8), await found(7)) == ([], [violation.replace("8", "7")])


async def test_a_version_created_after_a_turn_it_answered_is_a_violation(used: PostgresLearning) -> None:
    await used.execute("UPDATE versions SET created_at = now() + interval '1 hour' WHERE n = 1")
    assert {violation.invariant for violation in await violations(used.database)} == {
        "every turn names a version that existed when it began"
    }


async def test_turns_of_a_gateway_whose_clock_was_set_back_are_no_violation(used: PostgresLearning) -> None:
    await used.execute(
        "UPDATE turns SET started_at = started_at - interval '1 day', finished_at = finished_at - interval '1 day'"
    )
    assert await violations(used.database) == []


@pytest.mark.slow
async def test_clawloop_check_reports_violations_and_damaged_files(
    postgres_learning: PostgresLearning, postgres_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters" / POLICY / "v1-written"
    folder.mkdir(parents=True)
    for name in HASHED_FILES:
        (folder / name).write_text(name)
    await postgres_learning.add_samples(4)
    await postgres_learning.steps.claim(POLICY, 1)
    batch = await postgres_learning.steps.batch(POLICY, 1)
    made = trained(batch, sha256=adapter_sha256(folder))
    folder.rename(tmp_path / "adapters" / made.version.path)
    assert await commit(postgres_learning, batch, made) is StepState.COMMITTED
    assert damaged_files(await committed_versions(postgres_learning.database), tmp_path / "adapters") == []
    check = ("check", "--data", str(tmp_path))
    whole = clawloop_process(*check, DATABASE_URL=postgres_url)
    assert (whole.returncode, whole.stdout) == (
        0,
        f"No violation of {len(INVARIANTS)} invariants, 1 adapters verified.\n",
    )

    (tmp_path / "adapters" / made.version.path / HASHED_FILES[0]).write_text("another")
    await postgres_learning.execute("UPDATE turns SET version = 9")
    broken = await asyncio.to_thread(clawloop, *check, DATABASE_URL=postgres_url)
    assert broken.returncode == 1
    assert f"{made.version.path} holds" in broken.stdout
    assert "names version 9 of default" in broken.stdout
    listed = await asyncio.to_thread(clawloop, *check, "--json", "--no-files", DATABASE_URL=postgres_url)
    rows = json.loads(listed.stdout)["violations"]
    assert {row["invariant"] for row in rows} == {"every turn names a version that existed when it began"}
