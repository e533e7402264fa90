"""`clawloop plan`: which process runs on which GPU, with memory by part, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.chat_options import ChatTemplate, ReasoningParser, ToolCallParser
from clawloop.cli.layout_options import (
    MICRO_BATCH_TOKENS,
    Dtype,
    Indices,
    MaxLoras,
    MaxModelLen,
    MaxSampleTokens,
    Memory,
    MicroBatchTokens,
    Policies,
    Quantised,
    ServeModel,
    indices,
)

if TYPE_CHECKING:
    from clawloop.layout.parts import Layout
    from clawloop.layout.request import Gpus, TrainingNeeds


def plan_command(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    gpus: Annotated[
        str | None, typer.Option(metavar="80,80,…", help="GiB of each GPU, as nvidia-smi shows. Default: no GPU.")
    ] = None,
    serve_gpus: Indices = None,
    judge_gpus: Indices = None,
    train_gpus: Indices = None,
    serve_model: ServeModel = None,
    judge_model: Annotated[Path | None, typer.Option(help="A model folder of the judge engine.")] = None,
    memory: Memory = None,
    recipe: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The recipe to train by; the default one otherwise.")
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Plan a trainer, or only engines.")] = True,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_sample_tokens: MaxSampleTokens = None,
    micro_batch_tokens: MicroBatchTokens = MICRO_BATCH_TOKENS,
    quantise: Quantised = None,
    policies: Policies = 1,
    max_loras: MaxLoras = None,
    max_lora_rank: Annotated[int | None, typer.Option(min=1, help="Largest rank that engines load.")] = None,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which process runs on which GPU and why, with memory by part; refuse what cannot fit."""
    from clawloop.families.chat_format import ChatOptions
    from clawloop.layout.model_folder import read_model_shape
    from clawloop.layout.plan import plan
    from clawloop.layout.request import Gpus, Request, dtype_of, limits_for
    from clawloop.layout.served_copy import read_served_copy
    from clawloop.layout.table import as_data, table
    from clawloop.local.checks import require_model
    from clawloop.local.machine import memory_bytes

    chat = ChatOptions(chat_template, tool_call_parser, reasoning_parser)
    require_model(model, chat)
    shape = read_model_shape(model, chat)
    quantised = quantise is not None or serve_model is not None
    needs = _needs(recipe, quantised=quantised) if train else None
    limits = limits_for(
        shape,
        needs,
        max_model_len=max_model_len,
        max_sample_tokens=max_sample_tokens,
        micro_batch_tokens=micro_batch_tokens,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        policies=policies,
    )
    if judge_model is not None:
        require_model(judge_model)
    found: Gpus | None = None
    if gpus is not None:
        found = Gpus(
            sizes=_sizes(gpus),
            serve=indices("--serve-gpus", serve_gpus),
            judge=indices("--judge-gpus", judge_gpus),
            train=indices("--train-gpus", train_gpus),
        )
    elif serve_gpus or judge_gpus or train_gpus:
        raise typer.BadParameter("give the size of each GPU: --gpus 80,80", param_hint="--gpus")
    layout: Layout = plan(
        Request(
            model=shape,
            limits=limits,
            gpus=found,
            memory=memory_bytes() if memory is None else int(memory * 2**30),
            training=needs,
            dtype=dtype_of(dtype, shape.dtype, on_gpus=found is not None),
            judge_model=None if judge_model is None else read_model_shape(judge_model),
            serve_model=None if serve_model is None else read_served_copy(serve_model, model, shape, chat),
            quantise=None if quantise is None else "nf4",
        )
    )
    typer.echo(json.dumps(as_data(layout), indent=1) if as_json else table(layout))


def _needs(recipe: Path | None, *, quantised: bool) -> TrainingNeeds:
    """
    Raises:
        RecipeRejected: it cannot be read, or not be used with quantised weights.
    """
    from clawloop.layout.request import needs_of, require_decoupled_weights
    from clawloop.recipes.recipe import Recipe, load_recipe

    if recipe is None:
        return needs_of(Recipe(name="combined"))
    found = load_recipe(recipe)
    if quantised:
        require_decoupled_weights(found)
    return needs_of(found)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < 2**20 for size in sizes):
        raise typer.BadParameter(
            f"{text!r}: give the GiB of each GPU, separated by commas: --gpus 80,80", param_hint="--gpus"
        )
    return tuple(int(size * 2**30) for size in sizes)
