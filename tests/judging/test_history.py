"""Stored turns judged by another judge or recipe: real PostgreSQL, a scripted judge over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawloop.app.cli.main import app
from clawloop.app.processes.operations import NoTemporal, Operations
from clawloop.core.contracts.serving import Directory
from clawloop.core.errors import NotFound, RecipeRejected, StateConflict
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import Settings
from clawloop.operations.history import CONCURRENT_TURNS, HistoryOperations
from tests.fakes.notifier import FakeNotifier
from tests.judging.conftest import Bench, set_recipe, with_signal

pytestmark = pytest.mark.usefixtures("binary_bench")

OTHER = with_signal(m=1, at_least_one=True)
HINTS_ONLY = Recipe.model_validate(
    {
        "name": "hints",
        "signal": {"verdicts": False, "at_least_one": False},
        "train": {"advantage": {"verdict_weight": 0.0}},
    }
)


@asynccontextmanager
async def history(bench: Bench) -> AsyncIterator[tuple[HistoryOperations, FakeNotifier]]:
    notifier = FakeNotifier()
    settings = Settings(judge_url=bench.judge.url, judge_model="other")
    all_operations = Operations(bench.database, settings, notifier, NoTemporal())
    async with all_operations.history(lambda: Directory((), ())) as operations:
        yield operations, notifier


async def judged(bench: Bench, turns: int = 5) -> None:
    """A session whose turns, but the last, have the verdict 1."""
    records = bench.conversation(*(f"turn {number}" for number in range(turns + 1)))
    session = await bench.insert(*records)
    for record in records:
        await bench.judge_turn(session, record)


async def everything(bench: Bench) -> list[object]:
    tables = ("turns", "judgements", "votes", "hints", "samples")
    return [bench.rows(f"SELECT * FROM {table} ORDER BY 1::text, 2::text, 3::text") for table in tables]


async def test_verdicts_are_compared_and_nothing_changes(bench: Bench) -> None:
    await judged(bench)
    before = await everything(bench)
    votes = {"0": "1", "1": "-1", "2": "1", "3": "nonsense", "4": "1"}  # two turns are judged at once, in any order

    def vote_by_turn(body: dict[str, Any], question: str) -> str:
        mark, turn = re.findall(r"<task ([0-9a-f]{6}) user>\nturn (\d)", question)[-1]
        return f"verdict {mark}: {votes[turn]}"

    bench.judge.says = vote_by_turn
    async with history(bench) as (operations, notifier):
        found = await operations.compare("default", OTHER, 100)
    assert (found.judged, found.left, found.stopped) == (5, 0, None)
    assert (found.all.turns, found.all.agreed, found.all.missing) == (5, 3, 1)
    assert found.judge == f"other at {bench.judge.url}"
    assert set(found.versions) == {0}
    assert await everything(bench) == before
    assert notifier.sent == []


async def test_a_comparison_goes_on_where_it_stopped(bench: Bench) -> None:
    await judged(bench)
    asked = len(bench.judge.requests)
    async with history(bench) as (operations, _):
        assert ((found := await operations.compare("default", OTHER, 2)).judged, found.left) == (2, 3)
        bench.judge.mode = "503"
        found = await operations.compare("default", OTHER, 100)
        assert (found.judged, found.left, found.stopped) == (0, 3, "the judge answered 503")
        failed = len(bench.judge.requests) - asked - 2
        assert 1 <= failed <= CONCURRENT_TURNS
        bench.judge.mode = "well"
        found = await operations.compare("default", OTHER, 100)
        assert (found.judged, found.left, found.all.agreed) == (3, 0, 5)
        assert (await operations.compare("default", OTHER, 100)).judged == 0
    assert len(bench.judge.requests) == asked + 2 + failed + 3


async def test_turns_with_a_rating_are_left_out(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, first, feedback_id=bench.feedback(first, 1.0))
    async with history(bench) as (operations, _):
        assert (await operations.compare("default", OTHER, 100)).all.turns == 0


async def test_turns_that_differ_are_judged_again_if_asked(bench: Bench) -> None:
    await judged(bench, 3)
    bench.judge.votes = [1, -1, -1]
    await set_recipe(bench, OTHER)
    async with history(bench) as (operations, notifier):
        await operations.compare("default", None, 100)
        applied = await operations.apply("default", None)
        assert [one.refused for one in applied] == [None, None]
        assert len(notifier.sent) == 2
        assert await operations.apply("default", None) == []


async def test_what_cannot_be_of_use_is_refused(bench: Bench) -> None:
    async with history(bench) as (operations, _):
        with pytest.raises(StateConflict, match="set that recipe first"):
            await operations.apply("default", OTHER)
        with pytest.raises(RecipeRejected, match="no verdicts to compare"):
            await operations.compare("default", HINTS_ONLY, 1)
        with pytest.raises(NotFound):
            await operations.compare("nobody", OTHER, 1)


async def test_the_command_prints_the_agreement(bench: Bench, tmp_path: Path) -> None:
    await judged(bench, 4)
    (tmp_path / "other.toml").write_text(
        'name = "other"\n[signal]\nhints = false\nm = 1\n[train.advantage]\nteacher_weight = 0.0\n'
    )
    bench.judge.votes = [1, -1, 1]
    here = {
        "DATABASE_URL": bench.url,
        "CLAWLOOP_JUDGE_URL": bench.judge.url,
        "CLAWLOOP_JUDGE_MODEL": "other",
        "CLAWLOOP_DATA": str(tmp_path),
    }
    arguments = ["judge", "history", "--recipe", str(tmp_path / "other.toml")]
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=here)
    assert done.exit_code == 0, done.output
    assert "all turns: 3 of 4 agree (75%), kappa 0.00" in done.stdout
    assert "version 0: 3 of 4 agree (75%)" in done.stdout
    assert "     +1           -1      1" in done.stdout
    again = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"], env=here)
    assert (json.loads(again.stdout)["judged"], json.loads(again.stdout)["all"]["turns"]) == (0, 4)
    # Nobody answers the question: nothing is asked of Temporal, which is not there.
    asked = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--apply"], env=here)
    assert asked.exit_code == 1
    assert "Have the turns judged again on which the verdicts differ?" in asked.output
    # The workers' judge is set where they run, and nothing stored says which one it is.
    assert f"not the one compared here (other at {bench.judge.url}), switch the workers first" in asked.output
