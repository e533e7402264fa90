"""`clawloop erase`: a person has what was said taken away for good.

Knows nothing about where content is. Imports what is heavy only when the verb runs.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.terminal import AsJson, Data, settings_of, with_database
from clawloop.errors import SetupError, SignalFailed

if TYPE_CHECKING:
    from clawloop.contracts.sessions import Erasure
    from clawloop.ids import SessionId, TurnId
    from clawloop.settings import Settings
    from db.database import Database


def erase_command(
    session: Annotated[str | None, typer.Option(help="All there is of this session.")] = None,
    turn: Annotated[
        str | None,
        typer.Option(help="A reply's id (chatcmpl-…) or a turn's: it, its request, and all turns that continue it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Erase what was said, for good. Bare rows and what steps have learned stay."""
    if (session is None) == (turn is None):
        raise typer.BadParameter("say which: --session or --turn", param_hint="--session")
    settings = settings_of(data)
    found, first = with_database(data, lambda database: _find(database, session, turn))
    what = f"session {found}" if first is None else f"turn {first} and what continues it"
    if not yes:
        typer.confirm(f"Erase {what}? Nobody can bring it back.", abort=True, err=True)
    erasure = with_database(data, lambda database: _erase(database, found, first))
    problem = asyncio.run(_tell(settings, erasure))
    if as_json:
        told = {"workflow_told": problem is None}
        counts = {"turns": erasure.turns, "samples_expired": erasure.expired, "samples_learned": erasure.learned}
        typer.echo(json.dumps({"session_id": str(found)} | counts | told))
        return
    typer.echo(_in_words(erasure))
    if problem is not None:
        typer.echo(f"Its workflow was not told, so Temporal shows the turns as they were: {problem}", err=True)


async def _find(database: Database, session: str | None, turn: str | None) -> tuple[SessionId, TurnId | None]:
    """
    Raises:
        SetupError: there is no such session or turn.
        StoreUnavailable
    """
    from uuid import UUID

    from clawloop.ids import SessionId, turn_id_of
    from db.turns.sessions import PostgresSessionStore

    store = PostgresSessionStore(database)
    if turn is not None:
        turn_id = turn_id_of(turn)
        of_turn = None if turn_id is None else await store.session_of(turn_id)
        if of_turn is None:
            raise SetupError(f"no turn {turn!r} is stored")
        return of_turn, turn_id
    try:
        wanted = SessionId(UUID(session))
    except ValueError:
        wanted = None
    if wanted is None or await store.session(wanted) is None:
        raise SetupError(f"no session {session!r}; `clawloop session list` shows them")
    return wanted, None


async def _erase(database: Database, session: SessionId, turn: TurnId | None) -> Erasure:
    from db.erasure import PostgresErasureStore

    store = PostgresErasureStore(database)
    erasure = await (store.erase_session(session) if turn is None else store.erase_turn(turn))
    assert erasure is not None  # bare rows stay for good
    return erasure


async def _tell(settings: Settings, erasure: Erasure) -> str | None:
    """Why the session's workflow could not be told; None if it was, or none runs."""
    from datetime import timedelta

    from clawloop.processes.endpoints import temporal_address
    from clawloop.temporal.client import TemporalSessionNotifier, connect

    if (address := temporal_address(settings)) is None:
        return "no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal"
    notifier = TemporalSessionNotifier(
        await connect(address, lazy=True), timedelta(minutes=settings.session_idle_minutes)
    )
    try:
        await notifier.content_erased(erasure.session.session_id, erasure.message)
    except SignalFailed as error:
        return str(error)
    return None


def _in_words(erasure: Erasure) -> str:
    if not erasure.turns:
        return "All of it was erased before."
    said = f"{_counted(erasure.turns, 'turn')} erased."
    if erasure.expired:
        said += f" {_counted(erasure.expired, 'sample')} that waited for a step expired."
    if erasure.learned:
        said += (
            f" Steps have learned, or are learning, {_counted(erasure.learned, 'sample')} of it: that stays in their"
            " versions (`clawloop policy roll-back` goes back before them)."
        )
    return said


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
