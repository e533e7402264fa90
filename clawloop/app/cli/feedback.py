"""`clawloop feedback`: rates or comments on a reply from a terminal, or says how a session's task ended."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from clawloop.app.cli.gateway_request import Url, gateway_address, kept_key, post
from clawloop.app.cli.terminal import AsJson, Data

# The gateway stores the feedback before it answers: half a second, or a few on a busy machine.
_SECONDS = 30.0
_OUTCOMES = {"succeeded": 1, "failed": -1}

Key = Annotated[str | None, typer.Option(help="The chat key; by default the one that `up` made in the data folder.")]


def feedback(
    said: Annotated[
        str | None, typer.Argument(metavar="[SAID]", help="up, down, or what should have been different.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="The session, by the client's name for it or Clawloop's id; default: the newest.")
    ] = None,
    turn: Annotated[int | None, typer.Option(min=1, help="Number of the session's reply; default: the last.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Result of the task of --session: succeeded or failed.")] = None,
    url: Url = None,
    key: Key = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Rate or comment on the last reply, or on one of a session, or say how a session's task ended."""
    if turn is not None and session is None:
        raise typer.BadParameter("name the session too: --session", param_hint="--turn")
    if outcome is not None:
        body = _of_session(said, session, turn, outcome)
    elif said is None:
        raise typer.BadParameter("say up, down, or what should have been different", param_hint="SAID")
    else:
        body = {"turn": turn or "last"} | ({} if session is None else {"session_id": session})
        body |= {"rating": said} if said in ("up", "down") else {"text": said}
    taken = post(gateway_address(url, data), "/v1/feedback", body, key or kept_key(data, "chat"), _SECONDS)
    typer.echo(json.dumps(taken) if as_json else taken["message"])


def _of_session(said: str | None, session: str | None, turn: int | None, outcome: str) -> dict[str, int | str]:
    if outcome not in _OUTCOMES:
        raise typer.BadParameter("use succeeded or failed", param_hint="--outcome")
    if session is None or said is not None or turn is not None:
        raise typer.BadParameter(
            "an outcome belongs to a whole session: give it with --session only", param_hint="--outcome"
        )
    return {"session_id": session, "outcome": _OUTCOMES[outcome]}
