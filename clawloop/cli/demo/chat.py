"""`clawloop demo chat` as a person types it.

Knows nothing about how one chats. Imports what is heavy only when it runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.demo.demo_folder import Address
    from clawloop.settings import Settings

_UP_URL = "http://127.0.0.1:30000"


def chat_command(read_settings: Callable[[], Settings]) -> Callable[..., None]:
    """The Typer command."""

    def chat(
        url: Annotated[str | None, typer.Option(help="A gateway; the demo's, or that of `clawloop up`.")] = None,
        key: Annotated[str | None, typer.Option(help="To chat with.")] = None,
        admin_key: Annotated[str | None, typer.Option(help="To see verdicts; --key if it may.")] = None,
        data: Annotated[Path | None, typer.Option(help="Where a running demo or `up` keeps its data.")] = None,
    ) -> None:
        """Chat, and see under each answer its verdict, its hint and the version that gave it."""
        from rich.console import Console

        from clawloop.demo.chat import chat as talk

        try:
            if not sys.stdin.isatty():
                raise SetupError("a chat needs a terminal; for a program use the API")
            asyncio.run(talk(_address(url, key, admin_key, data or read_settings().data), Console()))
        except SetupError as error:
            typer.echo(f"clawloop: {error}", err=True)
            raise typer.Exit(1) from None

    return chat


def _address(url: str | None, key: str | None, admin_key: str | None, data: Path) -> Address:
    """What was given, the rest from the demo that runs on the data folder, else from `clawloop up` there."""
    from clawloop.demo.demo_folder import Address, read_address
    from clawloop.local.keys_file import read_keys

    if url is not None and key is not None:
        return Address(url.rstrip("/").removesuffix("/v1"), key, admin_key or key)
    known = read_address(data)
    if known is None:
        keys = read_keys(data / "keys.json")
        if "chat" not in keys and key is None:
            raise SetupError(f"nothing has run on {data}: give --url and --key, or run `clawloop demo run --keep`")
        known = Address(_UP_URL, keys.get("chat", ""), keys.get("admin"))
    at = (url or known.url).rstrip("/").removesuffix("/v1")
    return Address(at, key or known.key, admin_key or known.admin_key)
