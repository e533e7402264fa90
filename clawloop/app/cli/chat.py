"""`clawloop chat`: a chat in the terminal. Heavy imports happen inside the verb."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.terminal import Data, running_settings
from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from clawloop.app.demo.demo_folder import Address


def chat_command(
    url: Annotated[
        str | None, typer.Option(help="URL of a gateway; by default that of the `clawloop up` or demo that runs.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="API key for the chat; needed with --url.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="API key with the scope admin, for verdicts; by default that of what runs.")
    ] = None,
    data: Data = None,
) -> None:
    """Chat, with the verdict, hint and version shown under each answer."""
    if not sys.stdin.isatty():
        raise SetupError("a chat needs a terminal; programs can use the HTTP API")
    address = address_of(url, key, admin_key, data)
    from rich.console import Console

    from clawloop.app.demo.chat import chat

    asyncio.run(chat(address, Console()))


def address_of(url: str | None, key: str | None, admin_key: str | None, data: Path | None) -> Address:
    """The given options, completed from what runs on the data folder."""
    from clawloop.app.demo.demo_folder import Address, read_address
    from clawloop.app.local.keys_file import read_keys
    from clawloop.app.processes.endpoints import gateway_url, require_start

    if url is not None:
        if key is None:
            raise SetupError("give --key as well: keys of what runs here are not sent to another gateway")
        return Address(url.rstrip("/").removesuffix("/v1"), key, admin_key)
    settings = running_settings(data)
    address = read_address(settings.data) or read_address(settings.data.parent)
    if address is None:
        keys = read_keys(settings.data / "keys.json")
        if "chat" not in keys and key is None:
            require_start(settings.data)
            raise SetupError(
                f"nothing has run on {settings.data}: start `clawloop up` in another terminal, or give --url and --key"
            )
        address = Address(gateway_url(settings), keys.get("chat", ""), keys.get("admin"))
    return Address(address.url, key or address.key, admin_key or address.admin_key)
