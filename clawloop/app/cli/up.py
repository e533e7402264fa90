"""`clawloop up`: turns options, settings and the environment into one `UpOptions`. Heavy imports happen inside it."""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.plan import (
    MICRO_BATCH_TOKENS,
    ChatTemplate,
    Dtype,
    Indices,
    JudgeModel,
    MaxLoras,
    MaxModelLen,
    MaxSampleTokens,
    Memory,
    MicroBatchTokens,
    Model,
    Policies,
    Quantised,
    ReasoningParser,
    ServeModel,
    ToolCallParser,
    Trains,
    indices,
    model_folder,
)
from clawloop.app.cli.terminal import settings_of
from clawloop.app.local.machine import Device
from clawloop.core.errors import RecipeRejected, SetupError

if TYPE_CHECKING:
    from clawloop.app.local.parts import Deployment

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]


def up_command(
    data: Annotated[Path | None, typer.Option(help="Folder of all data; CLAWLOOP_DATA.")] = None,
    host: Annotated[str, typer.Option(help="Address the gateway listens on.")] = "127.0.0.1",
    port: Port = 30000,
    gateways: Annotated[
        int,
        typer.Option(min=1, max=8, help="Gateway processes on the port: while one restarts, others answer."),
    ] = 2,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A host name clients may use for the gateway; repeatable.")
    ] = None,
    temporal_port: Port = 7233,
    temporal_ui_port: Port = 8233,
    engine_port: Port = 8100,
    postgres_port: Port = 0,
    model: Model = None,
    alias: Annotated[list[str] | None, typer.Option(help="A further model name clients may use; repeatable.")] = None,
    device: Annotated[
        Device | None, typer.Option(help="Default: what `make setup` installed for.", show_default=False)
    ] = None,
    serve_gpus: Indices = None,
    judge_gpus: Indices = None,
    train_gpus: Indices = None,
    serve_model: ServeModel = None,
    judge_model: JudgeModel = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="A further argument of vLLM: --engine-arg=--max-num-seqs=64; repeatable."),
    ] = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_sample_tokens: MaxSampleTokens = None,
    micro_batch_tokens: MicroBatchTokens = MICRO_BATCH_TOKENS,
    quantise: Quantised = None,
    policies: Policies = 1,
    max_loras: MaxLoras = None,
    memory: Memory = None,
    recipe: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Recipe to learn by from now on; deploy/recipes has some."),
    ] = None,
    train: Trains = True,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
) -> None:
    """Start everything on this machine; Ctrl-C stops it. Data is kept."""
    from rich.console import Console

    from clawloop.app.local.model_layout import ModelOptions
    from clawloop.app.local.plan import UpOptions
    from clawloop.app.local.supervision.supervisor import LineBoard, TableBoard, open_board
    from clawloop.app.local.up import run
    from clawloop.core.families.chat_format import ChatOptions
    from clawloop.core.recipes.recipe import DEFAULT_RECIPE, WITHOUT_JUDGE, load_recipe

    settings = settings_of(data)
    chat = ChatOptions(chat_template, tool_call_parser, reasoning_parser)
    # The small model that comes along is no judge: its votes agree with labelled phrases by chance alone.
    judges_itself = model is None and not (settings.engines or settings.judge_url or judge_model or judge_gpus)
    try:
        models = settings.data.absolute() / "models"
        options = UpOptions(
            data=settings.data.absolute(),
            # The models that come along, here and in the demo, judge nothing but what they were made for.
            environment=({} if model is None or settings.engines else {"CLAWLOOP_JUDGE_TRY": "true"})
            | dict(os.environ),
            host=host,
            port=port,
            gateways=gateways,
            allowed_hosts=tuple(allowed_host or ()),
            temporal_port=temporal_port,
            temporal_ui_port=temporal_ui_port,
            engine_port=engine_port,
            postgres_port=postgres_port,
            # A model may take minutes to fetch: before anything is started, where Ctrl-C ends the program at once.
            model=None if settings.engines else model_folder(model, models, chat),
            aliases=tuple(alias or ()),
            models=ModelOptions(
                device=device,
                serve_gpus=indices("--serve-gpus", serve_gpus),
                judge_gpus=indices("--judge-gpus", judge_gpus),
                train_gpus=indices("--train-gpus", train_gpus),
                serve_model=None if serve_model is None else model_folder(serve_model, models, chat),
                judge_model=None if judge_model is None else model_folder(judge_model, models),
                engine_arguments=tuple(word for argument in engine_arg or () for word in shlex.split(argument)),
                dtype=dtype,
                max_model_len=max_model_len,
                max_sample_tokens=max_sample_tokens,
                micro_batch_tokens=micro_batch_tokens,
                quantise=quantise,
                max_loras=max_loras,
                policies=policies,
                max_lora_rank=settings.max_lora_rank,
                memory=None if memory is None else int(memory * 2**30),
                train=train,
                chat=chat,
            ),
            database_url=settings.database_url,
            temporal_address=settings.temporal_address,
            engines=settings.engines,
            recipe=None if recipe is None else load_recipe(recipe),
            first_recipe=WITHOUT_JUDGE if judges_itself else DEFAULT_RECIPE,
        )
        with open_board(Console(), LineBoard, TableBoard) as board:
            asyncio.run(run(options, board, prepare_deployment))
    except (SetupError, RecipeRejected) as error:
        typer.echo(f"clawloop: {error}", err=True)
        raise typer.Exit(1) from None


async def prepare_deployment(deployment: Deployment) -> dict[str, str]:
    """Write the runtime file and prepare the database; satisfies `clawloop.app.local.up.Prepare`."""
    from clawloop.app.processes.bootstrap import prepare
    from clawloop.app.processes.database import codec_of
    from clawloop.app.processes.endpoints import RuntimeAddresses, installation_id, write_runtime_file

    addresses = RuntimeAddresses(
        deployment.database_url,
        deployment.temporal_address,
        deployment.temporal_ui,
        deployment.gateway,
        deployment.context_tokens,
    )
    write_runtime_file(deployment.data, addresses)
    return await prepare(
        deployment.database_url,
        deployment.base_model,
        deployment.aliases,
        deployment.engines,
        deployment.keys,
        added_by=installation_id(deployment.data),
        recipe=deployment.recipe,
        first_recipe=deployment.first_recipe,
        max_lora_rank=deployment.max_lora_rank,
        quantised=deployment.quantised,
        content=codec_of(deployment.encryption_key_file),
    )
