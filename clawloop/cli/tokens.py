"""`clawloop why TURN --tokens`: a reply's tokens with their log-probs, and advantages where a step has trained them.

Heavy imports happen inside a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clawloop.cli.show import printable, show_json, show_table
from clawloop.cli.terminal import settings_of, with_database
from clawloop.errors import EngineAnswerUnusable

if TYPE_CHECKING:
    from clawloop.contracts.views import Tokens
    from db.database import Database

# A prefill of the reply alone; an engine that takes longer is away or busy, and ids do as well.
_TEXTS_SECONDS = 10.0


def show_tokens(turn: str, data: Path | None, *, as_json: bool) -> None:
    async def read(database: Database) -> tuple[Tokens, list[str] | None]:
        from clawloop.operations.reading import Reading
        from db.turns.sessions import PostgresSessionStore

        reading = Reading(PostgresSessionStore(database))
        detail = await reading.detail(turn, tokens=True)
        assert detail.tokens is not None  # asked for
        if as_json or not detail.tokens.response_ids:
            return detail.tokens, None
        session = (await reading.session(str(detail.turn.session_id), limit=1)).session
        return detail.tokens, await _texts(database, data, session.policy, detail.tokens.response_ids)

    tokens, texts = with_database(data, read)
    if as_json:
        show_json(tokens)
        return
    ids = tokens.response_ids or ()
    if not ids:
        typer.echo("no tokens are stored of this reply")
        return
    show_table(
        [
            {
                "id": str(token),
                "log-prob": "" if tokens.logprobs is None else f"{tokens.logprobs[at]:.3f}",
                "advantage": _of_step(tokens.advantages, at),
                **({} if tokens.moves is None else {"moved": _of_step(tokens.moves, at)}),
                "token": "" if texts is None else printable(repr(texts[at])),
            }
            for at, token in enumerate(ids)
        ]
    )
    by = _figures_of(tokens)
    typer.echo(by if texts is not None else f"{by}; no engine told the texts of the tokens")


def _figures_of(tokens: Tokens) -> str:
    if tokens.step is None:
        return "no step has trained it by advantages"
    by = f"advantages as step {tokens.step} used them"
    if tokens.moves is not None:
        by += ", and by how much it moved each log-prob"
    if tokens.moves_seconds is not None:
        by += f" (to read its batch once more took {tokens.moves_seconds:.2f} s)"
    return by


def _of_step(values: Sequence[float | None] | None, at: int) -> str:
    if values is None:
        return ""
    found = values[at]
    return "not trained" if found is None else f"{found:+.3f}"


async def _texts(database: Database, data: Path | None, policy: str, ids: Sequence[int]) -> list[str] | None:
    """The texts of the tokens; None if no engine gives them."""
    from clawloop.processes.judge import engine_endpoints
    from clawloop.serving.endpoints import JsonClient, NoReply
    from clawloop.serving.token_texts import PATH, texts_of, texts_request
    from db.serving.directory import PostgresDirectoryStore

    directory = await PostgresDirectoryStore(database).read()
    endpoints = engine_endpoints(settings_of(data), lambda: directory)(policy)
    async with JsonClient(_TEXTS_SECONDS) as client:
        try:
            return texts_of((await client.post(endpoints, PATH, texts_request(ids))).body, ids)
        except (NoReply, EngineAnswerUnusable):
            return None
