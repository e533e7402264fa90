"""`clawloop adapter`: works on adapter directories, without a database. Heavy imports happen inside a verb."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clawloop.app.cli.terminal import AsJson
from clawloop.core.errors import SetupError

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


@adapter_app.command("export")
def export_adapter(
    adapter: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Adapter in PEFT format, e.g. a version's directory.")
    ],
    push: Annotated[str, typer.Option(metavar="OWNER/NAME", help="A model of the Hugging Face Hub; made if missing.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make it for everybody to see. Default: private, if it is made now.")
    ] = False,
) -> None:
    """Push an adapter to the Hugging Face Hub, or another one at HF_ENDPOINT; HF_TOKEN signs in.

    Its config and its weights only: not the optimiser's state. The weights hold what was learned from conversations.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from clawloop.core.adapters.directory import CONFIG_FILE, WEIGHTS_FILE

    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (adapter / name).is_file():
            raise SetupError(f"--adapter {adapter} has no {name}")
    hub = HfApi()
    try:
        hub.create_repo(push, private=not public, exist_ok=True)
        done = hub.upload_folder(repo_id=push, folder_path=adapter, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
    except HFValidationError as error:
        raise SetupError(f"--push {push}: {error}") from error
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise SetupError(f"{hub.endpoint} did not take {push}: {' '.join(str(error).split())[:300]}") from error
    typer.echo(done.commit_url)
