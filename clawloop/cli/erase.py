"""`clawloop erase`: erases content for good. Heavy imports happen inside the verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.operations import with_operations, with_reading
from clawloop.cli.session import SESSION_HELP, TURN_HELP
from clawloop.cli.show import printable, show_json
from clawloop.cli.terminal import AsJson, Data

if TYPE_CHECKING:
    from clawloop.contracts.sessions import Erasure
    from clawloop.contracts.views import SessionView, TurnView
    from clawloop.ids import SessionId, TurnId
    from clawloop.operations.applied import Applied
    from clawloop.operations.reading import Reading
    from clawloop.processes.operations import Operations


def erase_command(
    session: Annotated[str | None, typer.Option(help=f"Erase this session. {SESSION_HELP}")] = None,
    turn: Annotated[
        str | None,
        typer.Option(help=f"Erase this turn, its request, and all turns that continue it. {TURN_HELP}"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Erase content, for good. Ids, verdicts and hashes remain, and so does what steps have learned."""
    if (session is None) == (turn is None):
        raise typer.BadParameter("give one of --session and --turn", param_hint="--session")
    of_session, of_turn = with_reading(data, lambda reading: _find(reading, session, turn))
    session_id, turn_id = of_session.id, None if of_turn is None else of_turn.id
    what = f"session {session_id}" if turn_id is None else f"turn {turn_id} and what continues it"
    if of_session.title is not None:
        what += f" ({printable(of_session.title)!r})"
    if not yes:
        typer.confirm(f"Erase {what}? This cannot be undone.", abort=True, err=True)
    applied = with_operations(data, lambda operations: _erase(operations, session_id, turn_id))
    erasure = applied.result
    if as_json:
        from clawloop.contracts.answers import ContentGone

        show_json(ContentGone.of(erasure, workflow_told=applied.signal_error is None))
        return
    typer.echo(_summary(erasure))
    if applied.signal_error is not None:
        typer.echo(f"Temporal shows the turns as they were; signal failed: {applied.signal_error}", err=True)


async def _find(reading: Reading, session: str | None, turn: str | None) -> tuple[SessionView, TurnView | None]:
    """
    Raises:
        NotFound, AmbiguousId, StoreUnavailable
    """
    view = None if turn is None else await reading.turn(turn)
    found = await reading.session(str(session) if view is None else str(view.session_id), limit=1)
    return found.session, view


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
