"""`clawloop erase`, from the command line to the end of the session's workflow: real Temporal, real PostgreSQL."""

from __future__ import annotations

import asyncio
import json

from temporalio.client import Client
from typer.testing import CliRunner, Result

from clawloop.app.cli.main import app
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound
from clawloop.core.ids import new_turn_id, response_id
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import until
from tests.workflows.test_whole import at_work, tell
from workflows import names

__all__ = ["bench", "binary_bench", "judge"]


async def clawloop(client: Client, bench: Bench, *arguments: str, said: str | None = None) -> Result:
    here = {"DATABASE_URL": bench.url, "TEMPORAL_ADDRESS": client.service_client.config.target_host}
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=here, input=said)


async def test_erasing_a_session_ends_its_workflow(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns)
    async with at_work(client, b):
        for turn in turns:
            await tell(client, session, turn)
        await until(lambda: len(b.rows("SELECT * FROM samples")) == 2)
        asked = await clawloop(client, b, "erase", "--session", str(session), said="n\n")
        assert asked.exit_code == 1
        assert f"Erase session {session} ('one')?" in asked.stderr
        assert (await b.turn(turns[0].turn_id)).record.messages
        done = await clawloop(client, b, "erase", "--session", str(session), said="y\n")
        assert done.stdout.endswith("3 turns erased. 2 samples that waited for a step expired.\n")
        handle = client.get_workflow_handle(names.session_workflow_id(session))
        async with asyncio.timeout(60):
            assert (await handle.result())["why"] == "erased"
    again = await clawloop(client, b, "erase", "--session", str(session), "--yes", "--json")
    assert json.loads(again.stdout) == {
        "session_id": str(session),
        "turns": 0,
        "samples_expired": 0,
        "samples_learned": 0,
        "workflow_told": True,
    }
    why = await clawloop(client, b, "why", response_id(turns[0].turn_id), "--json")
    assert json.loads(why.stdout)["outcome"] == "erased"
    checked = await clawloop(client, b, "check", "--no-files")
    assert checked.exit_code == 0


async def test_a_turn_is_erased(client: Client, binary_bench: Bench) -> None:
    first, second = binary_bench.conversation("one", "two")
    await binary_bench.insert(first, second)
    done = await clawloop(client, binary_bench, "erase", "--turn", response_id(second.turn_id), "--yes")
    assert done.stdout == "1 turn erased.\n"
    outcomes = [(await binary_bench.turn(turn.turn_id)).outcome for turn in (first, second)]
    assert outcomes == [TurnOutcome.WAITING, TurnOutcome.ERASED]


async def test_an_unknown_session_or_turn_is_refused(client: Client, bench: Bench) -> None:
    unknown = str(new_turn_id())
    for arguments in ([], ["--session", unknown, "--turn", unknown]):
        assert (await clawloop(client, bench, "erase", *arguments)).exit_code == 2
    for arguments, why in (
        (["--turn", unknown], f"no turn '{unknown}'"),
        (["--session", unknown], f"no session '{unknown}'"),
        (["--session", "x"], "no session 'x'"),
    ):
        error = (await clawloop(client, bench, "erase", *arguments)).exception
        assert isinstance(error, NotFound)
        assert why in str(error)
