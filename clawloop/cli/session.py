"""`clawloop session` and `clawloop why`: sessions, their turns, and each turn's result with its reason.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from clawloop.cli.terminal import AsJson, Data, fail, show_facts, show_rows, when, with_database

if TYPE_CHECKING:
    from clawloop.contracts.views import SessionView, TurnView
    from db.database import Database

session_app = typer.Typer(no_args_is_help=True, help="Sessions and the results of their turns.")


@session_app.command("list")
def list_sessions(
    policy: Annotated[str | None, typer.Option(help="Only sessions of this policy.")] = None,
    state: Annotated[str | None, typer.Option(help="open, ending or closed.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, the one with the newest turn first."""
    from clawloop.contracts.sessions import SessionState
    from db.turns.sessions import PostgresSessionStore

    try:
        in_state = None if state is None else SessionState(state)
    except ValueError:
        raise typer.BadParameter(f"{state!r}: use {', '.join(SessionState)}", param_hint="--state") from None
    sessions = with_database(
        data,
        lambda database: PostgresSessionStore(database).sessions(
            policy=policy, state=in_state, after=None, limit=limit
        ),
    )
    show_rows([_session_row(session) for session in sessions], as_json)


@session_app.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help="Id from `session list`.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a session's turns, each with its result and the reason."""
    from clawloop.ids import SessionId
    from db.turns.sessions import PostgresSessionStore

    try:
        session_id = SessionId(UUID(session))
    except ValueError:
        raise typer.BadParameter(f"{session!r} is not a session id") from None
    turns = with_database(data, lambda database: PostgresSessionStore(database).turns(session_id))
    if not turns:
        fail(f"no session {session!r}; `clawloop session list` shows them")
    show_rows([_turn_row(turn) for turn in turns], as_json)


def why_command(
    turn: Annotated[str, typer.Argument(metavar="ID", help="The id of a reply (chatcmpl-…) or of a turn.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show the result of one reply's turn, and the reason."""
    from clawloop.ids import turn_id_of
    from db.turns.sessions import PostgresSessionStore

    turn_id = turn_id_of(turn)

    async def read_turn(database: Database) -> TurnView | None:
        store = PostgresSessionStore(database)
        session = None if turn_id is None else await store.session_of(turn_id)
        turns = [] if session is None else await store.turns(session)
        return next((view for view in turns if view.id == turn_id), None)

    view = with_database(data, read_turn)
    if view is None:
        fail(f"no reply {turn!r} is stored")
    show_facts(_turn_facts(view), as_json)


def _session_row(session: SessionView) -> dict[str, str]:
    return {
        "id": str(session.id),
        "policy": session.policy,
        "state": session.state,
        "turns": str(session.main_turns),
        "side": str(session.side_turns),
        "waiting": str(session.waiting),
        "sampled": str(session.sampled),
        "newest turn": when(session.last_turn_at),
        "closed": session.closed_why or "",
        "at least one": session.guarantee or "",
    }


def _turn_row(turn: TurnView) -> dict[str, str]:
    from clawloop.judging.voting import signed

    return {
        "turn": "" if turn.number is None else str(turn.number),
        "id": str(turn.id),
        "kind": turn.kind,
        "status": turn.status,
        "version": str(turn.version),
        "verdict": "" if turn.verdict is None else signed(turn.verdict),
        "sample": turn.sample or "",
        "step": "" if turn.step is None else str(turn.step),
        "outcome": turn.outcome,
        "why": turn.why or "",
    }


def _turn_facts(turn: TurnView) -> dict[str, str]:
    """The turn's fields by their label; fields without a value are left out."""
    from clawloop.judging.voting import signed

    facts = {
        "outcome": turn.outcome,
        "why": turn.why,
        "turn": None if turn.number is None else f"{turn.number} of session {turn.session_id}",
        "kind": f"{turn.kind}: {turn.kind_reason}",
        "status": turn.status if turn.error is None else f"{turn.status}: {turn.error}",
        "version": str(turn.version),
        "verdict": None if turn.verdict is None else signed(turn.verdict),
        "expected": None if turn.expected is None else f"{turn.expected:+.2f} of {turn.votes} valid votes",
        "hint": turn.hint,
        "sample": turn.sample,
        "reward": None if turn.reward is None else f"{turn.reward:+g}",
        "step": None if turn.step is None else str(turn.step),
        "announced": None if turn.announced_at is None else when(turn.announced_at),
    }
    return {label: str(value) for label, value in facts.items() if value is not None}
