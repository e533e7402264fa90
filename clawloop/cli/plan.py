"""`clawloop plan`: which process runs on which GPU, with memory by part, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.chat_options import ChatTemplate, ReasoningParser, ToolCallParser

if TYPE_CHECKING:
    from clawloop.layout.parts import Layout
    from clawloop.layout.request import Dtype, Gpus, TrainingNeeds

Indices = Annotated[
    str | None, typer.Option(metavar="0,1,…", help="Indices into --gpus; chosen by the plan by default.")
]


def plan_command(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    gpus: Annotated[
        str | None, typer.Option(metavar="80,80,…", help="GiB of each GPU, as nvidia-smi shows. Default: no GPU.")
    ] = None,
    serve_gpus: Indices = None,
    judge_gpus: Indices = None,
    train_gpus: Indices = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="GiB of memory without a GPU; this machine's by default."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The recipe to train by; the default one otherwise.")
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Plan a trainer, or only engines.")] = True,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; by default bfloat16 on GPUs, else the model's own.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context of engines, in tokens.")] = None,
    max_sample_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest sample the trainer reads; --max-model-len if left out.")
    ] = None,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens the trainer reads at once.")] = 8192,
    max_loras: Annotated[int, typer.Option(min=1, help="Versions that have running requests at the same time.")] = 4,
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
    from clawloop.layout.request import Gpus, Request, limits_for
    from clawloop.layout.table import as_data, table

    shape = read_model_shape(model, ChatOptions(chat_template, tool_call_parser, reasoning_parser))
    needs = _needs(recipe) if train else None
    limits = limits_for(
        shape,
        needs,
        max_model_len=max_model_len,
        max_sample_tokens=max_sample_tokens,
        micro_batch_tokens=micro_batch_tokens,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )
    found: Gpus | None = None
    if gpus is not None:
        found = Gpus(
            sizes=_sizes(gpus),
            serve=_indices("--serve-gpus", serve_gpus),
            judge=_indices("--judge-gpus", judge_gpus),
            train=_indices("--train-gpus", train_gpus),
        )
    elif serve_gpus or judge_gpus or train_gpus:
        raise typer.BadParameter("give the size of each GPU: --gpus 80,80", param_hint="--gpus")
    layout: Layout = plan(
        Request(
            model=shape,
            limits=limits,
            gpus=found,
            memory=_memory() if memory is None else int(memory * 2**30),
            training=needs,
            dtype=_dtype(dtype, shape.dtype if found is None else "bfloat16"),
        )
    )
    typer.echo(json.dumps(as_data(layout), indent=1) if as_json else table(layout))


def _needs(recipe: Path | None) -> TrainingNeeds:
    """
    Raises:
        RecipeRejected: it cannot be read.
    """
    from clawloop.layout.request import TrainingNeeds
    from clawloop.recipes.recipe import Recipe, load_recipe

    train = (Recipe(name="combined") if recipe is None else load_recipe(recipe)).train
    return TrainingNeeds(
        rank=train.lora.rank,
        compares_distributions=train.loss.distillation > 0,
        entropy=train.loss.entropy > 0,
    )


def _dtype(asked: str | None, otherwise: str) -> Dtype:
    chosen = asked or otherwise
    if chosen == "float32":
        return "float32"
    if chosen == "bfloat16":
        return "bfloat16"
    raise typer.BadParameter(f"{chosen!r}: use float32 or bfloat16", param_hint="--dtype")


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


def _indices(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise typer.BadParameter(f"{text!r}: give indices from 0 on, separated by commas: 0,1", param_hint=option)
    indices = tuple(int(word) for word in words)
    if len(set(indices)) != len(indices):
        raise typer.BadParameter(f"{text!r} names a GPU twice", param_hint=option)
    return indices


def _memory() -> int:
    """Bytes this process may use: the machine's, or its container's share."""
    import psutil

    total: int = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(total, int(words)) if words.isdigit() else total
