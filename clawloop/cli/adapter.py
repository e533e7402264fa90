"""`clawloop adapter`: adapters as directories.

Knows nothing about policies or stores. Imports what is heavy only when a verb runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clawloop.errors import SetupError

adapter_app = typer.Typer(no_args_is_help=True, help="Adapters, as directories.")


@adapter_app.callback()
def adapter() -> None:
    """Adapters, as directories."""


@adapter_app.command("merge")
def merge_adapter(
    base: Annotated[Path, typer.Option(help="Hugging Face checkpoint the adapter was trained on.")],
    adapter: Annotated[Path, typer.Option(help="Adapter in PEFT's format, e.g. a version's directory.")],
    out: Annotated[Path, typer.Option(help="Where the merged checkpoint goes; must not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Fold an adapter into its base model and check the result against the two.

    It writes a Hugging Face checkpoint in bfloat16. Merging needs memory for one shard, the check for the model
    in float32.
    """
    from safetensors import SafetensorError

    from clawloop.training.adapters.merge import merge

    try:
        report = merge(base, adapter, out)
    except (OSError, SafetensorError) as error:  # no space, no permission; nothing is left at `out`
        raise SetupError(f"{out} cannot be written: {error}") from error
    if as_json:
        typer.echo(json.dumps({"out": str(out), **asdict(report)}))
        return
    typer.echo(f"{out} is the base with the adapter folded in, in bfloat16.")
    typer.echo(
        f"Checked on random tokens: rounding moves its logits by {report.logit_error:.2%} of their norm; "
        f"the adapter had moved them by {report.logit_change:.2%}."
    )
