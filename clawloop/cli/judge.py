"""`clawloop judge`: what an operator can have judged.

Knows nothing about how it is judged: it tells the workflows of the sessions. Imports what is heavy only when a verb
runs.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.judging.rejudging import RejudgeFacts
    from clawloop.settings import Settings
    from db.judging.rejudging import PostgresRejudgeStore

judge_app = typer.Typer(no_args_is_help=True, help="What judges are asked.")

# Told one after the other, 10 ms each; whoever has more asks again.
UNJUDGED_LIMIT = 1000


@judge_app.callback()
def judge() -> None:
    """What judges are asked."""


@judge_app.command("again")
def rejudge(
    turn: Annotated[str | None, typer.Argument(metavar="[ID]", help="A reply's id (chatcmpl-…) or a turn's.")] = None,
    session: Annotated[str | None, typer.Option(help="All turns of this session that can be.")] = None,
    unjudged: Annotated[bool, typer.Option("--unjudged", help="All turns that got no valid vote.")] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of everything that survives a restart.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Have turns judged once more: by the recipe of now, without the votes of before."""
    from clawloop.settings import read_settings

    if [turn is not None, session is not None, unjudged].count(True) != 1:
        raise typer.BadParameter("say which: an ID, --session or --unjudged", param_hint="ID")
    settings = read_settings()
    settings = settings if data is None else settings.model_copy(update={"data": data})
    told = asyncio.run(_rejudge(settings, turn, session, unjudged))
    if as_json:
        typer.echo(json.dumps(told))
        return
    for row in told:
        typer.echo(f"{row['turn_id']} {row['said']}")
    if not told:
        typer.echo("No turn of that kind.")


async def _rejudge(
    settings: Settings, turn: str | None, session: str | None, unjudged: bool
) -> list[dict[str, object]]:
    """What was said of each turn.

    Raises:
        SetupError: there is no such turn or session, or the one turn cannot be judged again.
        SignalFailed, StoreUnavailable
    """
    from datetime import timedelta

    from clawloop.contracts.sessions import RejudgeRequested
    from clawloop.judging.rejudging import why_not_rejudged
    from clawloop.processes.endpoints import database_url, temporal_address
    from clawloop.temporal.client import TemporalSessionNotifier, connect
    from db.database import BACKGROUND_LIMIT, Database
    from db.judging.rejudging import PostgresRejudgeStore

    database = Database(database_url(settings), BACKGROUND_LIMIT)
    try:
        found = await _turns(PostgresRejudgeStore(database), turn, session, unjudged)
    finally:
        await database.close()
    if (address := temporal_address(settings)) is None:
        raise SetupError("no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal")
    sessions = TemporalSessionNotifier(
        await connect(address, lazy=True), timedelta(minutes=settings.session_idle_minutes)
    )
    told: list[dict[str, object]] = []
    for one in found:
        why = why_not_rejudged(one)
        if why is not None and turn is not None:
            raise SetupError(f"turn {one.turn_id} cannot be judged again: {why}")
        if why is None:
            await sessions.rejudge(one.session, RejudgeRequested(one.turn_id, one.next_revision))
        said = f"is judged again, revision {one.next_revision}" if why is None else f"stays: {why}"
        told.append({"turn_id": str(one.turn_id), "asked": why is None, "said": said})
    return told


async def _turns(
    store: PostgresRejudgeStore, turn: str | None, session: str | None, unjudged: bool
) -> list[RejudgeFacts]:
    from uuid import UUID

    from clawloop.ids import SessionId, turn_id_of

    if unjudged:
        return await store.unjudged(UNJUDGED_LIMIT)
    if turn is not None:
        turn_id = turn_id_of(turn)
        one = None if turn_id is None else await store.rejudge_facts(turn_id)
        if one is None:
            raise SetupError(f"no turn {turn!r} is stored")
        return [one]
    assert session is not None
    try:
        found = await store.of_session(SessionId(UUID(session)))
    except ValueError:
        found = []
    if not found:
        raise SetupError(f"no session {session!r}; `clawloop session list` shows them")
    return found
