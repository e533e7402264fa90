"""`clawloop status`, `check` and `recover`: whether all stands, and what to do where it does not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.operations import TemporalProbe, connect_temporal, with_operations
from clawloop.app.cli.terminal import AsJson, Data, age, doing, printable, running_settings, show_json, with_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clawloop.app.processes.recovery import Recovered
    from clawloop.app.temporal.replay import Replay
    from clawloop.core.contracts.answers import CheckReport, ServiceStatus
    from db.database import Database


# Status ---------------------------------------------------------------------------------------------------------------
# `clawloop status`: status of every component, in ten lines. Heavy imports happen inside the verb.

_POLICIES = 3
_LINES = 10


def status_command(data: Data = None, as_json: AsJson = False) -> None:
    """Show the status of every component: engines, versions, training, sessions, and current problems."""

    temporal = TemporalProbe(running_settings(data))
    status = with_operations(data, lambda operations: operations.overview(temporal.problem).status())
    if as_json:
        show_json(status)
        return
    lines = list(_lines(status))
    for line in [*lines, *_problem_lines(status.problems, _LINES - len(lines), _width(status))]:
        typer.echo(printable(line))


def _lines(status: ServiceStatus) -> Iterator[str]:
    width = _width(status)
    yield f"{'engines':<{width}} {status.engines_answering} of {status.engines} take requests"
    for policy in status.policies[:_POLICIES]:
        pinned = " (pinned)" if policy.pinned is not None else ""
        ahead = "" if policy.head == policy.version else f", v{policy.head} is newer"
        now = f"; {doing(policy.progress)}" if policy.progress is not None else ""
        yield f"{policy.policy:<{width}} v{policy.version} answers{pinned}{ahead}; {policy.state}: {policy.reason}{now}"
    if len(status.policies) > _POLICIES:
        yield f"{'':<{width}} and {len(status.policies) - _POLICIES} more: clawloop policy list"
    newest = "none yet" if status.newest_turn_at is None else f"the newest turn {age(status.newest_turn_at)} ago"
    yield f"{'sessions':<{width}} {status.sessions}, {status.open_sessions} not closed yet; {newest}"
    yield f"{'replies':<{width}} {status.waiting} wait for a reaction or a verdict"


def _problem_lines(problems: Sequence[str], room: int, width: int) -> Iterator[str]:
    shown = problems if len(problems) <= room else problems[: room - 1]
    for problem in shown:
        yield f"{'problem':<{width}} {problem}"
    if len(problems) > len(shown):
        yield f"{'':<{width}} and {len(problems) - len(shown)} more: --json"
    if not problems:
        yield f"{'problems':<{width}} none"


def _width(status: ServiceStatus) -> int:
    return max([10, *(len(policy.policy) for policy in status.policies[:_POLICIES])])


# Check ----------------------------------------------------------------------------------------------------------------
# `clawloop check`: verifies the ledger's invariants and the hashes of the adapter files; `check replay`: that this
# version's workers can continue the open workflows.
#
# Heavy imports happen inside a verb.

check_app = typer.Typer()


@check_app.callback(invoke_without_command=True)
def check_command(
    context: typer.Context,
    files: Annotated[bool, typer.Option(help="Also verify the hashes of the adapters in the data folder.")] = True,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Check that no stored rows contradict others, also while everything runs. Exit code 1 if some do."""
    if context.invoked_subcommand is not None:
        return
    adapters = running_settings(data).data / "adapters"

    async def check(database: Database) -> CheckReport:
        from clawloop.app.processes.operations import DatabaseCheck

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
        client = await connect_temporal(running_settings(data))
        from clawloop.app.temporal.replay import replay_open_workflows

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


# Recover --------------------------------------------------------------------------------------------------------------
# `clawloop recover`: brings Temporal in line with PostgreSQL after either lost data.
#
# Heavy imports happen inside it.


def recover_command(data: Data = None, as_json: AsJson = False) -> None:
    """Restart workflows from PostgreSQL's data, and list what PostgreSQL lost. Nothing is trained twice.

    It may be run again, also where it ended half-way.
    """

    def name_lost(line: str) -> None:
        # Printed as soon as it is known, and not among the JSON on standard output.
        typer.echo(f"lost: {line}", err=as_json)

    async def recover(database: Database) -> Recovered:
        settings = running_settings(data)
        client = await connect_temporal(settings)
        from clawloop.app.processes.holding import take_database
        from clawloop.app.processes.recovery import recovery_of

        # First: with a server other than the one before it marks what waits, and the sweep does the rest by itself.
        await take_database(database, client)
        return await recovery_of(database, client, settings).recover(name_lost)

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
