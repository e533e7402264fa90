"""`clawloop up`: turns options, settings and the environment into one `UpOptions`. Heavy imports happen inside it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.chat_options import ChatTemplate, ReasoningParser, ToolCallParser
from clawloop.cli.terminal import settings_of
from clawloop.errors import RecipeRejected, SetupError

if TYPE_CHECKING:
    from clawloop.local.parts import Deployment

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]


def up_command(
    data: Annotated[Path | None, typer.Option(help="Folder of all data; CLAWLOOP_DATA.")] = None,
    host: Annotated[str, typer.Option(help="Address the gateway listens on.")] = "127.0.0.1",
    port: Port = 30000,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A host name clients may use for the gateway; repeatable.")
    ] = None,
    temporal_port: Port = 7233,
    temporal_ui_port: Port = 8233,
    engine_port: Port = 8100,
    postgres_port: Port = 0,
    model: Annotated[
        Path | None, typer.Option(help="A model folder. Default: a tiny model with random weights, for a trial.")
    ] = None,
    alias: Annotated[list[str] | None, typer.Option(help="A further model name clients may use; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's own.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context, in tokens.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Recipe to learn by from now on; deploy/recipes has some."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train; or only record and judge, with less memory.")
    ] = True,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
) -> None:
    """Start everything on this machine; Ctrl-C stops it. Data is kept."""
    from rich.console import Console

    from clawloop.families.chat_format import ChatOptions
    from clawloop.local.plan import UpOptions
    from clawloop.local.supervision.status import status_board
    from clawloop.local.up import run
    from clawloop.recipes.recipe import load_recipe

    settings = settings_of(data)
    options = UpOptions(
        data=settings.data.absolute(),
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
        chat=ChatOptions(chat_template, tool_call_parser, reasoning_parser),
    )
    try:
        options = replace(options, recipe=None if recipe is None else load_recipe(recipe))
        with status_board(Console()) as board:
            asyncio.run(run(options, board, prepare_deployment))
    except (SetupError, RecipeRejected) as error:
        typer.echo(f"clawloop: {error}", err=True)
        raise typer.Exit(1) from None


async def prepare_deployment(deployment: Deployment) -> dict[str, str]:
    """Write the runtime file and prepare the database; satisfies `clawloop.local.up.Prepare`."""
    from clawloop.processes.bootstrap import prepare
    from clawloop.processes.runtime_file import RuntimeAddresses, installation_id, write_runtime_file

    addresses = RuntimeAddresses(deployment.database_url, deployment.temporal_address)
    write_runtime_file(deployment.data, addresses)
    return await prepare(
        deployment.database_url,
        deployment.base_model,
        deployment.aliases,
        deployment.engines,
        deployment.keys,
        added_by=installation_id(deployment.data),
        recipe=deployment.recipe,
        max_lora_rank=deployment.max_lora_rank,
    )
