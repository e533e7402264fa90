"""`clawloop check`: verifies the ledger's invariants and the hashes of the adapter files; `check replay`: that this
version's workers can continue the open workflows.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.operations import connect_temporal
from clawloop.cli.show import show_json
from clawloop.cli.terminal import AsJson, Data, settings_of, with_database

if TYPE_CHECKING:
    from clawloop.contracts.answers import CheckReport
    from clawloop.temporal.replay import Replay
    from db.database import Database

check_app = typer.Typer()


@check_app.callback(invoke_without_command=True)
def check_command(
    context: typer.Context,
    files: Annotated[bool, typer.Option(help="Also verify the hashes of the adapters in the data folder.")] = True,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Verify the ledger, also while everything runs. Exit code 1 if an invariant is violated."""
    if context.invoked_subcommand is not None:
        return
    adapters = settings_of(data).data / "adapters"

    async def check(database: Database) -> CheckReport:
        from clawloop.processes.ledger_check import DatabaseCheck

        return await DatabaseCheck(database, adapters).report(files=files)

    report = with_database(data, check)
    if as_json:
        show_json(report)
    else:
        for violation in report.violations:
            typer.echo(f"violated: {violation.invariant}: {violation.row}")
        if not report.violations:
            typer.echo(f"No violation of {report.invariants} invariants, {report.adapters} adapters verified.")
    if report.violations:
        sys.exit(1)


@check_app.command("replay")
def check_replay(data: Data = None, as_json: AsJson = False) -> None:
    """Before a deploy: replay the open workflows on this version's code. Exit code 1 if one could not go on."""

    async def replay_all() -> list[Replay]:
        client = await connect_temporal(settings_of(data))
        from clawloop.temporal.replay import replay_open_workflows

        return [replay async for replay in replay_open_workflows(client)]

    replays = asyncio.run(replay_all())
    failed = [replay for replay in replays if replay.problem is not None]
    if as_json:
        typer.echo(json.dumps([asdict(replay) for replay in replays]))
    else:
        for replay in failed:
            typer.echo(f"cannot go on: {replay.workflow_id} ({replay.workflow_type}): {replay.problem}")
        counts = Counter(replay.workflow_type for replay in replays)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
        going_on = len(replays) - len(failed)
        typer.echo(f"open workflows: {kinds}; {going_on} of {len(replays)} can go on with this version.")
    if failed:
        sys.exit(1)
