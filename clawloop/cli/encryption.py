"""`clawloop encryption`: the keys that encrypt conversations at rest. Heavy imports happen inside a verb."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.terminal import AsJson, Data, fail, settings_of

if TYPE_CHECKING:
    from clawloop.processes.reencryption import Reencrypted

encryption_app = typer.Typer(no_args_is_help=True, help="Encryption of conversations at rest.")


@encryption_app.callback()
def encryption() -> None:
    """Encryption of conversations at rest."""


@encryption_app.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="The file of keys, for CLAWLOOP_ENCRYPTION_KEY_FILE.")],
    add: Annotated[bool, typer.Option("--add", help="Put a new key before the others, which still decrypt.")] = False,
) -> None:
    """Make a file with a new key. Keep a copy elsewhere: without the file, encrypted content cannot be read."""
    from clawloop.encryption.key_file import SETTING, add_key, make_keys

    if add:
        typer.echo(
            f"{file} has {add_key(file)} keys. Processes that read this file encrypt with the new one from now on;"
        )
        typer.echo(
            "copy it to where others read it. Then run `clawloop encryption rotate`, and remove the old ones when it"
        )
        typer.echo("has nothing left to do.")
        return
    make_keys(file)
    typer.echo(f"{file} has a key. Keep a copy elsewhere: without the file, encrypted content cannot be read.")
    typer.echo(f"To use it, start all processes with {SETTING}={file.absolute()}")


@encryption_app.command("rotate")
def rotate_keys(
    decrypt: Annotated[
        bool, typer.Option("--decrypt", help="Store all as plain content. Stop everything first.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Encrypt all stored content by the first key of the file, also while everything runs. Can be interrupted."""
    from clawloop.encryption.key_file import SETTING
    from clawloop.processes.reencryption import reencrypt

    settings = settings_of(data)
    if settings.encryption_key_file is None:
        fail(f"nothing is encrypted without keys: set {SETTING}")

    def tell(table: str, rows: int) -> None:
        if not as_json:
            typer.echo(f"{table}: {rows} rows", err=True)

    done = asyncio.run(reencrypt(settings, decrypt=decrypt, told=tell))
    if as_json:
        typer.echo(json.dumps({"rows": done.rows, "files": done.files, "unreadable": done.unreadable}))
    else:
        _report(done, decrypt=decrypt)
    if done.unreadable:
        sys.exit(1)


def _report(done: Reencrypted, *, decrypt: bool) -> None:
    from clawloop.encryption.key_file import SETTING

    what = "decrypted" if decrypt else "encrypted by the first key"
    typer.echo(f"{sum(done.rows.values())} rows and {done.files} files {what}.")
    for place in done.unreadable:
        typer.echo(f"left as it is: {place}")
    if decrypt and not done.unreadable:
        typer.echo(f"The database takes plain content now: start everything without {SETTING}.")
