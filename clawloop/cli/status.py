"""`clawloop status`: how all stands, in ten lines. Heavy imports happen inside the verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clawloop.cli.operations import TemporalProbe, links_of, operations_of
from clawloop.cli.show import age, doing, printable, show_json
from clawloop.cli.terminal import AsJson, Data, settings_of, with_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clawloop.contracts.answers import ServiceStatus
    from db.database import Database

_POLICIES = 3
_LINES = 10


def status_command(data: Data = None, as_json: AsJson = False) -> None:
    """Show the status of every component: engines, versions, training, sessions, and current problems."""

    async def read(database: Database) -> ServiceStatus:
        from clawloop.operations.overview import Overview
        from clawloop.processes.engine_operations import engine_operations_on
        from db.overview import PostgresOverviewStore
        from db.training.operators import PostgresTrainingStore

        engines = engine_operations_on(database, settings_of(data))
        training = PostgresTrainingStore(database)
        store, temporal = PostgresOverviewStore(database), TemporalProbe(settings_of(data))
        rollouts = operations_of(database, data).rollouts
        return await Overview(store, engines, training, temporal, rollouts, links_of(data)).status()

    status = with_database(data, read)
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
    yield f"{'turns':<{width}} {status.waiting} wait for what follows them or for their judge"


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
