"""`clawloop up` as a person types it.

Knows nothing about how things are started: it turns options, settings and the environment into one call. Imports
what is heavy only when it runs, so that `clawloop --help` stays quick.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.errors import RecipeRejected, SetupError

if TYPE_CHECKING:
    from clawloop.local.up import Prepare
    from clawloop.settings import Settings

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]


def up_command(read_settings: Callable[[], Settings], load_prepare: Callable[[], Prepare]) -> Callable[..., None]:
    """The Typer command.

    Args:
        load_prepare: gives what readies the database (see `clawloop.local.up.Prepare`); called when it is needed.
    """

    def up(
        data: Annotated[Path | None, typer.Option(help="Folder of all that is kept; CLAWLOOP_DATA.")] = None,
        host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
        port: Port = 30000,
        allowed_host: Annotated[
            list[str] | None, typer.Option(help="A name clients may address the gateway by; repeatable.")
        ] = None,
        temporal_port: Port = 7233,
        temporal_ui_port: Port = 8233,
        engine_port: Port = 8100,
        postgres_port: Port = 0,
        model: Annotated[
            Path | None, typer.Option(help="A model folder. Without it: a random tiny one, to try things.")
        ] = None,
        alias: Annotated[
            list[str] | None, typer.Option(help="One more name clients may use for the model; repeatable.")
        ] = None,
        dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; the model's own if left out.")] = None,
        max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context, in tokens.")] = None,
        recipe: Annotated[
            Path | None,
            typer.Option(exists=True, dir_okay=False, help="What to learn by from now on; deploy/recipes has some."),
        ] = None,
        train: Annotated[
            bool, typer.Option("--train/--no-train", help="Learn; or only record and judge, with less memory.")
        ] = True,
    ) -> None:
        """Start everything on this machine; Ctrl-C stops it. Data is kept."""
        from rich.console import Console

        from clawloop.local.supervision.status import shown
        from clawloop.local.up import UpOptions, run
        from clawloop.recipes.recipe import load_recipe

        settings = read_settings()
        options = UpOptions(
            data=(data or settings.data).absolute(),
            environment=dict(os.environ),
            host=host,
            port=port,
            allowed_hosts=tuple(allowed_host or ()),
            temporal_port=temporal_port,
            temporal_ui_port=temporal_ui_port,
            engine_port=engine_port,
            postgres_port=postgres_port,
            model=model,
            aliases=tuple(alias or ()),
            dtype=dtype,
            max_model_len=max_model_len,
            database_url=settings.database_url,
            temporal_address=settings.temporal_address,
            engines=settings.engines,
            train=train,
            max_lora_rank=settings.max_lora_rank,
        )
        try:
            options = replace(options, recipe=None if recipe is None else load_recipe(recipe))
            with shown(Console()) as board:
                asyncio.run(run(options, board, load_prepare()))
        except (SetupError, RecipeRejected) as error:
            typer.echo(f"clawloop: {error}", err=True)
            raise typer.Exit(1) from None

    return up
