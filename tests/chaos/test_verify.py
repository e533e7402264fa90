"""The checks of a run with faults notice a lost reply, one with another parent or version, and wrong weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from clawloop.core.adapters.directory import HASHED_FILES, adapter_sha256
from clawloop.core.contracts.turns import TurnRecord, TurnStatus
from clawloop.core.ids import response_id, version_name
from db.database import Database
from db.invariants import INVARIANTS, Violation, violations
from db.serving.engines import add_engine
from tests.chaos import verify
from tests.chaos.chatters import Seen
from tests.chaos.stack import Stack
from tests.chaos.stand_in_engine import StandInEngine, stand_in_engine
from tests.chaos.verify import Verifier
from tests.conftest import execute
from tests.judging.conftest import Bench, bench, judge

__all__ = ["bench", "judge"]

BASE = version_name("default", 0, "tiny")
SERVED = version_name("default", 3, "tiny")


@dataclass
class Checked:
    """What a run with faults looks at: PostgreSQL, an engine and the folder of adapters, with one version."""

    bench: Bench
    engine: StandInEngine
    verifier: Verifier
    adapter: Path
    settle: Callable[[float], None]

    async def problems(self, *seen: Seen) -> list[str]:
        """What is wrong with these replies, or with the weights that are served."""
        self.verifier.checked = 0
        return await self.verifier.problems(seen)


@pytest.fixture
async def checked(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Checked]:
    settle = partial(monkeypatch.setattr, verify, "SETTLE_SECONDS")
    settle(0.0)
    adapter = tmp_path / "adapters" / "default" / "v3-0123456789ab"
    adapter.mkdir(parents=True)
    for name in HASHED_FILES:
        (adapter / name).write_bytes(b"{}")
    await add_engine(bench.database, "http://gpu:8100")
    execute(
        bench.url,
        "INSERT INTO versions (policy, n, parent, path, sha256) "
        f"VALUES ('default', 3, 0, 'default/{adapter.name}', '\\x{adapter_sha256(adapter)}')",
    )
    execute(bench.url, "INSERT INTO engine_versions (engine_id, policy, version) VALUES ('gpu:8100', 'default', 3)")
    async with stand_in_engine("tiny", seed=1) as engine:
        engine.roots[SERVED] = str(adapter)
        stack = SimpleNamespace(
            database_url=bench.url,
            engine_url=engine.url,
            data=tmp_path,
            base_model=BASE,
            judge=SimpleNamespace(questions=[], unknown=[]),
        )
        verifier = Verifier(cast(Stack, stack))
        yield Checked(bench, engine, verifier, adapter, settle)
        await verifier.close()


def seen_of(turn: TurnRecord, before: TurnRecord | None = None, model: str = BASE) -> Seen:
    assert turn.response is not None
    previous = None if before is None else response_id(before.turn_id)
    return Seen(1, 1, response_id(turn.turn_id), previous, model, str(turn.response["content"]))


async def test_replies_that_are_stored_as_the_client_saw_them_are_no_problem(checked: Checked) -> None:
    first, second = checked.bench.conversation("one", "two", session="with \0, which a random model writes")
    await checked.bench.insert(first, second)
    assert await checked.problems(seen_of(first), seen_of(second, first)) == []
    assert checked.verifier.compared == 1


async def test_a_reply_that_is_not_stored_is_named(checked: Checked) -> None:
    first, second = checked.bench.conversation("one", "two")
    await checked.bench.insert(first)
    (found,) = await checked.problems(seen_of(first), seen_of(second, first))
    assert found.startswith(f"acknowledged turn {second.turn_id} of Seen(")
    assert found.endswith("lost or elsewhere")


async def test_a_reply_with_another_parent_is_named(checked: Checked) -> None:
    first, second, third = checked.bench.conversation("one", "two", "three")
    await checked.bench.insert(first, second, third)
    found = await checked.problems(seen_of(third, first))
    assert f"turn {third.turn_id} has the parent {second.turn_id}, not {first.turn_id}" in found


async def test_a_reply_of_another_version_than_the_client_was_told_is_named(checked: Checked) -> None:
    (turn,) = checked.bench.conversation("one", version=3)
    await checked.bench.insert(turn)
    execute(checked.bench.url, "UPDATE versions SET created_at = created_at - interval '1 hour'")
    assert await checked.problems(seen_of(turn, model=SERVED)) == []
    (found,) = await checked.problems(seen_of(turn, model=BASE))
    assert found == f"turn {turn.turn_id} was answered by {BASE}, and is stored with version 3"


async def test_a_reply_of_a_version_that_is_stored_as_the_base_models_is_named(checked: Checked) -> None:
    (turn,) = checked.bench.conversation("one")
    await checked.bench.insert(turn)
    (found,) = await checked.problems(seen_of(turn, model=SERVED))
    assert found == f"turn {turn.turn_id} was answered by {SERVED}, and is stored with version 0"


async def test_a_reply_that_is_stored_cut_or_with_another_text_is_named(checked: Checked) -> None:
    (turn,) = checked.bench.conversation("one")
    await checked.bench.insert(turn)
    (found,) = await checked.problems(replace(seen_of(turn), text="another"))
    assert found == f"turn {turn.turn_id} is stored as complete with the text 'answer 0 of s', not 'another'"
    execute(checked.bench.url, f"UPDATE turns SET status = '{TurnStatus.ABORTED}'")
    (found,) = await checked.problems(seen_of(turn))
    assert found.startswith(f"turn {turn.turn_id} is stored as aborted")


async def test_a_violation_that_no_transaction_may_leave_is_named_although_it_heals(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that settles is waited for at the same time."""
    first, second = checked.bench.conversation("one", "two")
    session = await checked.bench.insert(first, second)
    execute(checked.bench.url, f"UPDATE sessions SET state = 'closed' WHERE id = '{session}'")
    execute(checked.bench.url, "UPDATE turns SET version = 3, started_at = started_at - interval '1 hour'")
    checked.settle(60)
    looked = asyncio.Event()

    async def looking_once(database: Database) -> list[Violation]:
        found = await violations(database)
        looked.set()
        return found

    monkeypatch.setattr(verify, "violations", looking_once)
    looking = asyncio.create_task(checked.problems())
    await looked.wait()
    execute(checked.bench.url, "UPDATE turns SET version = 0, outcome = 'no_feedback'")
    found = await looking
    assert [problem.partition(":")[0] for problem in found] == [
        "every turn names a version that existed when it began"
    ] * 2


def test_what_may_settle_are_invariants() -> None:
    assert INVARIANTS.keys() >= verify.SETTLING


async def test_another_directory_in_the_engine_is_named(checked: Checked, tmp_path: Path) -> None:
    checked.engine.roots[SERVED] = str(tmp_path / "elsewhere")
    (found,) = await checked.problems()
    where = f"{tmp_path / 'elsewhere'} in the engine, and default/{checked.adapter.name} in PostgreSQL"
    assert found == f"{SERVED} is {where}"


async def test_changed_weights_of_a_version_in_the_engine_are_named(checked: Checked) -> None:
    (checked.adapter / HASHED_FILES[0]).write_bytes(b"[]")
    found = await checked.problems()
    assert any(problem.startswith(f"{SERVED} is served with wrong files: ") for problem in found)
