"""Options that `clawloop plan` and `clawloop up` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Quantise(StrEnum):
    NF4 = "nf4"


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
    Quantise | None,
    typer.Option(
        "--quantise", help="Keep the trainer's base model in 4 bits (QLoRA); the recipe needs a decoupled correction."
    ),
]
ServeModel = Annotated[
    Path | None,
    typer.Option(help="A quantised copy of the model (AWQ, GPTQ, FP8), which engines serve instead of it."),
]
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
