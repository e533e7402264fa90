"""`clawloop adapter`: works on adapter directories, without a database. Heavy imports happen inside a verb."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clawloop.cli.terminal import AsJson
from clawloop.errors import SetupError

adapter_app = typer.Typer(no_args_is_help=True, help="Adapter directories.")


@adapter_app.callback()
def adapter() -> None:
    """Adapter directories."""


@adapter_app.command("merge")
def merge_adapter(
    base: Annotated[Path, typer.Option(help="Hugging Face checkpoint the adapter was trained on.")],
    adapter: Annotated[Path, typer.Option(help="Adapter in PEFT format, e.g. a version's directory.")],
    out: Annotated[Path, typer.Option(help="Directory of the merged checkpoint; must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base model and compare the result with base and adapter.

    Writes a Hugging Face checkpoint in bfloat16. Merging needs memory for one shard, the comparison for the model
    in float32.
    """
    from safetensors import SafetensorError

    from clawloop.training.adapters.merge import merge

    try:
        report = merge(base, adapter, out)
    except (OSError, SafetensorError) as error:  # e.g. no space or no permission; `out` has been removed
        raise SetupError(f"{out} cannot be written: {error}") from error
    if as_json:
        typer.echo(json.dumps({"out": str(out), **asdict(report)}))
        return
    typer.echo(f"{out} is the base model with the adapter merged, in bfloat16.")
    typer.echo(
        f"Compared on random tokens: rounding changes the logits by {report.logit_error:.2%} of their norm; "
        f"the adapter changes them by {report.logit_change:.2%}."
    )
