"""`clawloop model`: the models of the data folder. Heavy imports happen inside a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.plan import MODEL_HELP, ChatTemplate, model_folder
from clawloop.app.cli.terminal import AsJson, Data, settings_of, show_json, show_table

if TYPE_CHECKING:
    from clawloop.app.models.library import KeptModel

model_app = typer.Typer(no_args_is_help=True, help="Models of the data folder.")


@model_app.callback()
def model() -> None:
    """Models of the data folder."""


@model_app.command("list")
def list_models(data: Data = None, as_json: AsJson = False) -> None:
    """List the models that were fetched into the data folder."""
    from clawloop.app.models.library import kept_models

    kept = kept_models(settings_of(data).data / "models")
    if as_json:
        show_json(kept)
        return
    show_table([_row(one) for one in kept], none="no model was fetched yet")


@model_app.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}.")],
    chat_template: ChatTemplate = None,
    data: Data = None,
) -> None:
    """Fetch a model into the data folder, or go on where it was interrupted; prints its folder.

    HF_TOKEN signs in, HF_ENDPOINT names another hub.
    """
    from clawloop.core.families.chat_format import ChatOptions

    typer.echo(model_folder(name, settings_of(data).data / "models", ChatOptions(chat_template)))


@model_app.command("remove")
def remove_model(name: Annotated[str, typer.Argument(help="As `model list` shows it.")], data: Data = None) -> None:
    """Delete a model of the data folder, which `clawloop up` must not be serving."""
    from clawloop.app.local.checks import lock_data_folder
    from clawloop.app.models.library import remove_model as remove

    folder = settings_of(data).data
    with lock_data_folder(folder):
        gone = remove(name, folder / "models")
    typer.echo(f"{gone.name} is removed: {gone.bytes / 1e9:.1f} GB")


def _row(kept: KeptModel) -> dict[str, str]:
    return {
        "name": kept.name,
        "GB": f"{kept.bytes / 1e9:.1f}",
        "at": "incomplete" if kept.revision is None else kept.revision[:20],
        "folder": str(kept.folder),
    }
