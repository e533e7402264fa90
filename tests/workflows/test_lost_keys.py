"""A restored PostgreSQL lacks a key: the turns that the disk holds of it are stored after `clawloop recover`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.recording.spool import Spool, StrandedTurns, rejected_turns
from clawloop.app.processes.recovery import Recovered, Recovery
from clawloop.core.encryption.key_file import make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import SetupError
from clawloop.core.ids import new_api_key_id, new_turn_id
from clawloop.core.telemetry.metrics import GatewayMetrics
from db.invariants import violations
from db.judging.feedback import PostgresFeedbackStore
from db.recovery import PostgresRecoveryStore
from db.serving.directory import ensure_policy
from db.turns.insert import PostgresTurnStore
from tests.api.conftest import until
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.test_recovery import Scripted

__all__ = ["bench", "binary_bench", "judge"]

LIMIT = 2**20


@asynccontextmanager
async def draining(b: Bench, folder: Path, sealer: Sealer | None) -> AsyncIterator[Spool]:
    """A gateway's recorder, which stores what the disk holds."""
    spool = Spool(folder, LIMIT, reserve_bytes=0, sealer=sealer)
    store, metrics = PostgresTurnStore(b.database), GatewayMetrics()
    try:
        async with (
            NotificationQueue(None, store, PostgresFeedbackStore(b.database), metrics) as notifications,
            Recorder(store, store, spool, metrics, notifications),
        ):
            yield spool
    finally:
        spool.close()


async def recover(b: Bench, folder: Path, sealer: Sealer | None) -> Recovered:
    recovery = Recovery(PostgresRecoveryStore(b.database), Scripted(), None, StrandedTurns(folder, sealer))
    return await recovery.recover(list[str]().append)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_turns_of_a_lost_key_are_stored_as_those_of_a_revoked_one(
    binary_bench: Bench, tmp_path: Path, encrypted: bool
) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    sealer = None
    if encrypted:
        make_keys(tmp_path / "keys")
        sealer = Sealer(tmp_path / "keys")
    own = b.conversation("mine")[0]
    first, second = (replace(turn, api_key_id=lost) for turn in b.conversation("one", "two", session="lost"))
    async with draining(b, folder, sealer) as spool:
        # A gateway that knew the key for some seconds more; PostgreSQL does not any more.
        for turn in (own, first):
            spool.write(turn)
        await until(lambda: not spool.turns)
    assert [path.stem for path in rejected_turns(folder)] == [str(first.turn_id)]
    waits = Spool(folder, LIMIT, reserve_bytes=0, sealer=sealer)  # of a gateway that was stopped then
    waits.write(second)
    waits.close()

    recovered = await recover(b, folder, sealer)

    assert recovered.put_back == 1
    named = f"key {lost} of policy default; 2 turns of it are on the disk, and are stored as those of a revoked key"
    assert recovered.unknown[1:] == (named,)
    async with draining(b, folder, sealer) as spool:
        await until(lambda: not spool.turns)
    stored = "SELECT t.id FROM turns t JOIN sessions s ON s.id = t.session_id WHERE s.api_key_id = %s ORDER BY t.id"
    assert b.rows(stored, lost) == [{"id": first.turn_id}, {"id": second.turn_id}]
    (key,) = b.rows("SELECT name, revoked_at IS NOT NULL AS revoked FROM api_keys WHERE id = %s", lost)
    assert key == {"name": "lost", "revoked": True}
    again = await recover(b, folder, sealer)
    assert (again.put_back, again.unknown[1:]) == (0, ())
    assert await violations(b.database) == []


async def test_turns_of_a_lost_policy_wait_until_it_is_made_again(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    turn = replace(b.conversation("one")[0], api_key_id=lost, policy="anna")
    async with draining(b, folder, None) as spool:
        spool.write(turn)
        await until(lambda: not spool.turns)
    recovered = await recover(b, folder, None)
    held = f"policy anna, with key {lost}; 1 turns of it are on the disk: make the policy again"
    assert (recovered.put_back, recovered.unknown[-1][: len(held)]) == (0, held)
    await ensure_policy(b.database, "anna", "tiny", [])
    recovered = await recover(b, folder, None)
    assert (recovered.put_back, recovered.unknown[-1].startswith(f"key {lost} of policy anna")) == (1, True)
    async with draining(b, folder, None) as spool:
        await until(lambda: not spool.turns)
    assert b.rows("SELECT id FROM turns") == [{"id": turn.turn_id}]


async def test_what_was_set_aside_for_another_reason_stays_there(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder = binary_bench, tmp_path / "spool"
    known, lost = b.conversation("one")[0], replace(b.conversation("two")[0], api_key_id=new_api_key_id())
    spool = Spool(folder, LIMIT, reserve_bytes=0)
    for turn in (known, lost):
        spool.write_rejected(turn)
    (folder / "gateway-0" / "rejected" / f"{new_turn_id()}.json").write_text("{}")
    spool.close()
    assert (await recover(b, folder, None)).put_back == 1
    assert len(rejected_turns(folder)) == 2
    # As after one that ended before it put the turn back: the key is stored already.
    spool = Spool(folder, LIMIT, reserve_bytes=0)
    spool.reject(lost.turn_id)
    spool.close()
    assert (await recover(b, folder, None)).put_back == 1


async def test_a_spool_that_this_user_may_not_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    (folder / "gateway-0" / "lock").mkdir(parents=True)  # also root cannot open it
    with pytest.raises(SetupError, match="run this as the user of the gateways"):
        await StrandedTurns(folder, None).keys()


async def test_a_running_gateway_stores_what_was_put_back(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    turn = replace(b.conversation("one")[0], api_key_id=lost)
    async with draining(b, folder, None) as spool:
        spool.write(turn)
        await until(lambda: rejected_turns(folder))
        assert (await recover(b, folder, None)).put_back == 1
        async with asyncio.timeout(30):
            while not b.rows("SELECT FROM turns"):
                await asyncio.sleep(0.1)
