"""`clawloop erase`: erases content for good. Heavy imports happen inside the verb."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.operations import with_operations
from clawloop.cli.terminal import AsJson, Data, with_database
from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.contracts.sessions import Erasure
    from clawloop.ids import SessionId, TurnId
    from clawloop.operations.applied import Applied
    from clawloop.processes.operations import Operations
    from db.database import Database


def erase_command(
    session: Annotated[str | None, typer.Option(help="Erase this session.")] = None,
    turn: Annotated[
        str | None,
        typer.Option(help="Erase this reply (chatcmpl-…) or turn, its request, and all turns that continue it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Erase content, for good. Rows without content, and what steps have learned, stay."""
    if (session is None) == (turn is None):
        raise typer.BadParameter("give one of --session and --turn", param_hint="--session")
    session_id, turn_id = with_database(data, lambda database: _find(database, session, turn))
    what = f"session {session_id}" if turn_id is None else f"turn {turn_id} and what continues it"
    if not yes:
        typer.confirm(f"Erase {what}? This cannot be undone.", abort=True, err=True)
    applied = with_operations(data, lambda operations: _erase(operations, session_id, turn_id))
    erasure = applied.result
    if as_json:
        notified = {"workflow_told": applied.signal_error is None}
        counts = {"turns": erasure.turns, "samples_expired": erasure.expired, "samples_learned": erasure.learned}
        typer.echo(json.dumps({"session_id": str(session_id)} | counts | notified))
        return
    typer.echo(_summary(erasure))
    if applied.signal_error is not None:
        typer.echo(f"Temporal shows the turns as they were; signal failed: {applied.signal_error}", err=True)


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
        session_of_turn = None if turn_id is None else await store.session_of(turn_id)
        if session_of_turn is None:
            raise SetupError(f"no turn {turn!r} is stored")
        return session_of_turn, turn_id
    try:
        session_id = SessionId(UUID(session))
    except ValueError:
        session_id = None
    if session_id is None or await store.session(session_id) is None:
        raise SetupError(f"no session {session!r}; `clawloop session list` shows them")
    return session_id, None


async def _erase(operations: Operations, session_id: SessionId, turn_id: TurnId | None) -> Applied[Erasure]:
    sessions = operations.sessions
    applied = await (sessions.erase_session(session_id) if turn_id is None else sessions.erase_turn(turn_id))
    assert applied is not None  # rows without content stay for good
    return applied


def _summary(erasure: Erasure) -> str:
    if not erasure.turns:
        return "All of it was erased before."
    summary = f"{_count(erasure.turns, 'turn')} erased."
    if erasure.expired:
        summary += f" {_count(erasure.expired, 'sample')} that waited for a step expired."
    if erasure.learned:
        summary += (
            f" Steps have trained, or are training, {_count(erasure.learned, 'sample')} of it, which stay in their"
            " versions (`clawloop policy roll-back` goes back before them)."
        )
    return summary


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
