"""`clawloop judge`: has turns judged again. Heavy imports happen inside the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.operations import with_operations
from clawloop.cli.terminal import AsJson, Data, fail
from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.operations.sessions import RejudgeResult, SessionOperations

judge_app = typer.Typer(no_args_is_help=True, help="Judging.")


@judge_app.callback()
def judge() -> None:
    """Judging."""


@judge_app.command("again")
def rejudge(
    turn: Annotated[str | None, typer.Argument(metavar="[ID]", help="A reply's id (chatcmpl-…) or a turn's.")] = None,
    session: Annotated[str | None, typer.Option(help="All turns of this session that can be.")] = None,
    unjudged: Annotated[bool, typer.Option("--unjudged", help="All turns without a valid vote.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Have turns judged again: with the recipe of now, without the earlier votes."""
    if [turn is not None, session is not None, unjudged].count(True) != 1:
        raise typer.BadParameter("give one of ID, --session and --unjudged", param_hint="ID")
    results = with_operations(data, lambda operations: _rejudge(operations.sessions, turn, session))
    rows = [
        {"turn_id": str(result.turn_id), "asked": result.refused is None, "said": _message(result)}
        for result in results
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['turn_id']} {row['said']}")
    if not rows:
        typer.echo("No turn of that kind.")


@judge_app.command("history")
def compare_history(
    recipe: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Recipe that judges; the policy's own by default."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Its turns are judged.")] = "default",
    apply: Annotated[
        bool, typer.Option("--apply", help="Then have those turns judged again on which the verdicts differ.")
    ] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="Judge at most this many further turns.")] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored turns by another judge or recipe and compare the verdicts; changes nothing without --apply."""
    from clawloop.cli.history import compare, shown

    found = compare(data, recipe, policy, turns, apply=apply)
    typer.echo(json.dumps(found) if as_json else shown(found))
    if found["stopped"] is not None:
        fail(f"{found['stopped']}; the same command goes on with the {found['left']} turns that are left")


def _message(result: RejudgeResult) -> str:
    if result.refused is not None:
        return f"stays: {result.refused}"
    return f"is judged again, revision {result.revision}"


async def _rejudge(operations: SessionOperations, turn: str | None, session: str | None) -> list[RejudgeResult]:
    """
    Raises:
        SetupError: there is no such turn or session, or the one turn cannot be judged again.
        SignalFailed, StoreUnavailable
    """
    from uuid import UUID

    from clawloop.ids import SessionId, turn_id_of

    if turn is not None:
        turn_id = turn_id_of(turn)
        result = None if turn_id is None else await operations.rejudge_turn(turn_id)
        if result is None:
            raise SetupError(f"no turn {turn!r} is stored")
        if result.refused is not None:
            raise SetupError(f"turn {result.turn_id} cannot be judged again: {result.refused}")
        return [result]
    if session is None:
        return await operations.rejudge_unjudged()
    try:
        results = await operations.rejudge_session(SessionId(UUID(session)))
    except ValueError:
        results = []
    if not results:
        raise SetupError(f"no session {session!r}; `clawloop session list` shows them")
    return results
