"""`clawloop judge again`, from the command line to the new verdict: real Temporal, real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from temporalio.client import Client
from typer.testing import CliRunner, Result

from clawloop.app.cli.main import app
from clawloop.core.contracts.turns import TurnOutcome, TurnRecord
from clawloop.core.errors import NotFound, SignalFailed
from clawloop.core.ids import SessionId, new_turn_id, response_id
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import until
from tests.workflows.test_whole import at_work, end, tell

__all__ = ["bench", "binary_bench", "judge"]


async def clawloop(client: Client, bench: Bench, *arguments: str, temporal: str | None = None) -> Result:
    address = temporal or client.service_client.config.target_host
    here = {"DATABASE_URL": bench.url, "TEMPORAL_ADDRESS": address}
    return await asyncio.to_thread(CliRunner().invoke, app, ["judge", "again", *arguments], env=here)


async def end_unjudged(client: Client, b: Bench) -> tuple[SessionId, list[TurnRecord]]:
    """A conversation of three turns that has ended, whose judge did not answer."""
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns[:-1], replace(turns[-1], ends_session=True))
    for turn in turns:
        await tell(client, session, turn, ends=turn is turns[-1])
    await end(client, session)
    assert [(await b.turn(turn.turn_id)).outcome for turn in turns] == ["unjudged", "unjudged", "no_feedback"]
    return session, turns


async def test_unjudged_turns_are_judged_when_an_operator_asks(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    b.judge.mode = "401"
    async with at_work(client, b):
        session, turns = await end_unjudged(client, b)
        b.judge.mode = "well"
        said = await clawloop(client, b, "--unjudged", "--json")
        asked = [(str(turn.turn_id), None) for turn in turns[:-1]]
        assert [(row["turn_id"], row["refused"]) for row in json.loads(said.stdout)["turns"]] == asked
        samples = "SELECT * FROM samples"
        await until(lambda: len(b.rows(samples)) == 2)
        assert (await clawloop(client, b, "--unjudged")).stdout == "No turn of that kind.\n"

        b.judge.votes = [-1]
        said = await clawloop(client, b, "--session", str(session))
        assert "stays: no later message is about it" in said.stdout
        assert said.stdout.count("is judged again, revision 2") == 2
        await until(lambda: len(b.rows(samples)) == 4)
        said = await clawloop(client, b, response_id(turns[0].turn_id))
        assert said.stdout == f"{turns[0].turn_id} is judged again, revision 3\n"
        await until(lambda: len(b.rows(samples)) == 5)
    assert (await b.turn(turns[1].turn_id)).outcome is TurnOutcome.SAMPLED
    fresh = b.rows("SELECT reward FROM samples WHERE state = 'fresh'")
    assert [sample["reward"] for sample in fresh] == [-1.0, -1.0]


async def test_turns_that_cannot_be_judged_again_are_refused_with_the_reason(client: Client, bench: Bench) -> None:
    (only,) = bench.conversation("one")
    session = await bench.insert(only)
    unknown = str(new_turn_id())
    assert (await clawloop(client, bench, unknown, "--unjudged")).exit_code == 2
    assert (await clawloop(client, bench)).exit_code == 2
    for arguments, why in (
        ([unknown], f"no turn '{unknown}'"),
        (["--session", unknown], f"no session '{unknown}'"),
        (["--session", "x"], "no session 'x'"),
    ):
        error = (await clawloop(client, bench, *arguments)).exception
        assert isinstance(error, NotFound)
        assert why in str(error)
    early = (await clawloop(client, bench, str(only.turn_id))).exception
    assert "cannot be judged again: no message has followed it yet" in str(early)
    bench.feedback(only, 1.0)
    away = (await clawloop(client, bench, str(only.turn_id), temporal="127.0.0.1:1")).exception
    assert isinstance(away, SignalFailed)
    await bench.close(session)
    refused = (await clawloop(client, bench, str(only.turn_id))).exception
    assert "cannot be judged again: no later message is about it" in str(refused)
