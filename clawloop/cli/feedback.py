"""`clawloop feedback`: rates or comments on a reply from a terminal. Heavy imports happen inside the verb."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated

import typer

from clawloop.cli.terminal import Data, fail, settings_of

# The gateway stores the feedback before it answers: half a second, or a few on a busy machine.
_SECONDS = 30.0

Url = Annotated[str, typer.Option(help="The gateway's address.")]
Key = Annotated[str | None, typer.Option(help="The chat key; by default the one that `up` made in the data folder.")]


def feedback(
    said: Annotated[str, typer.Argument(help="up, down, or what should have been different.")],
    session: Annotated[
        str | None, typer.Option(help="The session, by the client's name for it or Clawloop's id; default: the newest.")
    ] = None,
    turn: Annotated[int | None, typer.Option(min=1, help="Which reply of the session; default: the last.")] = None,
    url: Url = "http://127.0.0.1:30000",
    key: Key = None,
    data: Data = None,
) -> None:
    """Rate or comment on the last reply, or on one of a session."""
    if turn is not None and session is None:
        raise typer.BadParameter("name the session too: --session", param_hint="--turn")
    body: dict[str, int | str] = {"turn": turn or "last"}
    if session is not None:
        body["session_id"] = session
    body |= {"rating": said} if said in ("up", "down") else {"text": said}
    request = urllib.request.Request(
        f"{url.rstrip('/').removesuffix('/v1')}/v1/feedback",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key or chat_key(data)}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            effect = json.load(answer)["effect"]
    except urllib.error.HTTPError as error:
        fail(_message(error.read()) or f"the gateway answered {error.code}")
    except (OSError, ValueError) as error:
        fail(f"no gateway answers at {url} ({error}): start `clawloop up`, or give --url")
    typer.echo(f"Noted: {effect.replace('_', ' ')}.")


def chat_key(data: Data) -> str:
    """The chat key that `clawloop up` made on this data folder."""
    from clawloop.local.keys_file import read_keys

    path = settings_of(data).data / "keys.json"
    key = read_keys(path).get("chat")
    if key is None:
        fail(f"{path} has no chat key: give --key")
    return key


def _message(raw: bytes) -> str | None:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return None
    return message if isinstance(message, str) else None
