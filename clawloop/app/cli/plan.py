"""`clawloop plan`: which process runs on which GPU, with memory by part; and the options it shares with `up`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.terminal import Data, settings_of
from clawloop.training.options import Quantisation

if TYPE_CHECKING:
    from clawloop.app.layout.memory import Layout
    from clawloop.app.layout.request import Gpus, TrainingNeeds
    from clawloop.core.families.chat_format import ChatOptions


# Models ---------------------------------------------------------------------------------------------------------------
# `--model` of `up`, `plan` and others: fetched into the data folder where it is not there yet.

MODEL_HELP = "A model folder, OWNER/NAME of the Hugging Face Hub (@REVISION may follow), or smollm2"
Model = Annotated[str | None, typer.Option(metavar="MODEL", help=f"{MODEL_HELP}. Default: smollm2.")]


def model_folder(name: str | None, models: Path, chat: ChatOptions | None = None) -> Path:
    """The folder of a model, fetched if it is not there; None is the default one. See `models.library.find_model`."""
    from clawloop.app.models.library import SMOLLM2, find_model

    return find_model(SMOLLM2 if name is None else name, models, chat)


# Chat options ---------------------------------------------------------------------------------------------------------
# Options of `up` and `plan` that override the settings of a model's family.

ChatTemplate = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="A chat template (Jinja) instead of the model's own."),
]
ToolCallParser = Annotated[
    str | None, typer.Option(help="vLLM's parser of tool calls, or none; by default that of the model's family.")
]
ReasoningParser = Annotated[
    str | None, typer.Option(help="vLLM's parser of thinking, or none; by default that of the model's family.")
]


# Layout options -------------------------------------------------------------------------------------------------------
# Options that `clawloop plan` and `clawloop up` share.

Indices = Annotated[
    str | None, typer.Option(metavar="0,1,…", help="GPUs for it, counted from 0; the plan chooses them by default.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32 or bfloat16, on GPUs bfloat16 alone; by default that on GPUs, else the model's own."),
]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest context of engines, in tokens.")]
MaxSampleTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest sample the trainer reads; --max-model-len if left out.")
]
MicroBatchTokens = Annotated[int, typer.Option(min=1, help="Tokens the trainer reads at once.")]
MaxLoras = Annotated[
    int | None,
    typer.Option(min=1, help="Versions that have running requests at the same time; by default as --policies needs."),
]
Policies = Annotated[
    int, typer.Option(min=1, max=1000, help="Policies that the engines answer for, one for each person say.")
]
Memory = Annotated[float | None, typer.Option(min=0.1, help="GiB of memory without a GPU; this machine's by default.")]
Quantised = Annotated[
    Quantisation | None,
    typer.Option(
        "--quantise", help="Keep the trainer's base model in 4 bits (QLoRA); the recipe needs a decoupled correction."
    ),
]
ServeModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="A quantised copy of the model (AWQ, GPTQ, FP8), which engines serve instead of it."
    ),
]
JudgeModel = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A model of a judge engine; by default the model judges itself."),
]
Trains = Annotated[bool, typer.Option("--train/--no-train", help="With a trainer; or only record and judge.")]
MICRO_BATCH_TOKENS = 8192


def indices(option: str, text: str | None) -> tuple[int, ...] | None:
    """
    Raises:
        BadParameter: no list of indices.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise typer.BadParameter(f"{text!r}: give indices from 0 on, separated by commas: 0,1", param_hint=option)
    numbers = tuple(int(word) for word in words)
    if len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{text!r} names a GPU twice", param_hint=option)
    return numbers


# The command ----------------------------------------------------------------------------------------------------------
# `clawloop plan`: which process runs on which GPU, with memory by part, before anything is started.


def plan_command(
    model: Model = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="80,80,…", help="GiB of each GPU, as nvidia-smi shows. Default: no GPU.")
    ] = None,
    serve_gpus: Indices = None,
    judge_gpus: Indices = None,
    train_gpus: Indices = None,
    serve_model: ServeModel = None,
    judge_model: JudgeModel = None,
    memory: Memory = None,
    recipe: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The recipe to train by; the default one otherwise.")
    ] = None,
    train: Trains = True,
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
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which process runs on which GPU and why, with memory by part; refuse what cannot fit."""
    from clawloop.app.layout.model_folder import read_model_shape, read_served_copy
    from clawloop.app.layout.plan import plan
    from clawloop.app.layout.request import Gpus, Request, dtype_of, limits_for
    from clawloop.app.layout.table import as_data, table
    from clawloop.app.local.checks import require_model
    from clawloop.app.local.machine import memory_bytes
    from clawloop.app.local.model_layout import why_untrained
    from clawloop.core.families.chat_format import ChatOptions

    models = settings_of(data).data / "models"
    chat = ChatOptions(chat_template, tool_call_parser, reasoning_parser)
    folder = model_folder(model, models, chat)
    require_model(folder, chat)
    shape = read_model_shape(folder, chat)
    quantised = quantise is not None or serve_model is not None
    untrained = why_untrained(folder) if train else None
    needs = _needs(recipe, quantised=quantised) if train and untrained is None else None
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
    judge = None if judge_model is None else model_folder(judge_model, models)
    if judge is not None:
        require_model(judge)
    served = None if serve_model is None else model_folder(serve_model, models, chat)
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
            judge_model=None if judge is None else read_model_shape(judge),
            serve_model=None if served is None else read_served_copy(served, folder, shape, chat),
            quantise=quantise,
        )
    )
    if untrained is not None:
        layout = replace(layout, notes=(*layout.notes, untrained))
    typer.echo(json.dumps(as_data(layout), indent=1) if as_json else table(layout))


def _needs(recipe: Path | None, *, quantised: bool) -> TrainingNeeds:
    """
    Raises:
        RecipeRejected: it cannot be read, or not be used with quantised weights.
    """
    from clawloop.app.layout.request import needs_of, require_decoupled_weights
    from clawloop.core.recipes.recipe import DEFAULT_RECIPE, load_recipe

    if recipe is None:
        return needs_of(DEFAULT_RECIPE)
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
