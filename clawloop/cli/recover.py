"""`clawloop recover`: brings Temporal in line with PostgreSQL after either lost data.

Heavy imports happen inside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from clawloop.cli.operations import connect_temporal
from clawloop.cli.terminal import AsJson, Data, settings_of, with_database

if TYPE_CHECKING:
    from clawloop.operations.recovery import Recovered
    from db.database import Database


def recover_command(data: Data = None, as_json: AsJson = False) -> None:
    """Restart workflows from PostgreSQL's data, and list what PostgreSQL lost. Nothing is trained twice.

    It may be run again, also where it ended half-way.
    """

    def name_lost(line: str) -> None:
        # Printed as soon as it is known, and not among the JSON on standard output.
        typer.echo(f"lost: {line}", err=as_json)

    async def recover(database: Database) -> Recovered:
        settings = settings_of(data)
        client = await connect_temporal(settings)
        from clawloop.processes.holding import take_database
        from clawloop.processes.operations import recovery_on

        # First: with a server other than the one before it marks what waits, and the sweep does the rest by itself.
        await take_database(database, client)
        return await recovery_on(database, client, settings).recover(name_lost)

    recovered = with_database(data, recover)
    if as_json:
        typer.echo(json.dumps(asdict(recovered)))
        return
    waiting = recovered.waiting
    typer.echo(f"training workflows started again: {', '.join(recovered.policies) or 'none, there is no policy'}")
    typer.echo(
        f"signalled again by the sweep that starts now: {waiting.turns} waiting turns of {waiting.sessions} sessions, "
        f"{waiting.feedback} pieces of feedback; judgements asked for again: {recovered.rejudged}"
    )
    if recovered.put_back:
        typer.echo(f"turns that gateways had set aside, and try to store again: {recovered.put_back}")
    if not recovered.unknown:
        typer.echo("Temporal and the disk hold nothing that PostgreSQL does not know.")
