"""The command `clawloop demo chat`. Heavy modules are imported only when it runs."""

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
    """Return the Typer command."""

    def chat(
        url: Annotated[
            str | None, typer.Option(help="URL of a gateway; by default the demo's or that of `clawloop up`.")
        ] = None,
        key: Annotated[str | None, typer.Option(help="API key for the chat.")] = None,
        admin_key: Annotated[str | None, typer.Option(help="API key for verdicts; --key by default.")] = None,
        data: Annotated[Path | None, typer.Option(help="Data folder of a running demo or `clawloop up`.")] = None,
    ) -> None:
        """Chat, with the verdict, hint and version shown under each answer."""
        from rich.console import Console

        from clawloop.demo.chat import chat as talk

        try:
            if not sys.stdin.isatty():
                raise SetupError("a chat needs a terminal; programs can use the HTTP API")
            asyncio.run(talk(_address(url, key, admin_key, data or read_settings().data), Console()))
        except SetupError as error:
            typer.echo(f"clawloop: {error}", err=True)
            raise typer.Exit(1) from None

    return chat


def _address(url: str | None, key: str | None, admin_key: str | None, data: Path) -> Address:
    """Complete the given options from the demo that runs on the data folder, else from `clawloop up` there."""
    from clawloop.demo.demo_folder import Address, read_address
    from clawloop.local.keys_file import read_keys

    if url is not None and key is not None:
        return Address(url.rstrip("/").removesuffix("/v1"), key, admin_key or key)
    address = read_address(data)
    if address is None:
        keys = read_keys(data / "keys.json")
        if "chat" not in keys and key is None:
            raise SetupError(
                f"no demo or `clawloop up` has run on {data}: give --url and --key, or run `clawloop demo run --keep`"
            )
        address = Address(_UP_URL, keys.get("chat", ""), keys.get("admin"))
    gateway = (url or address.url).rstrip("/").removesuffix("/v1")
    return Address(gateway, key or address.key, admin_key or address.admin_key)
