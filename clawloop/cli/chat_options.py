"""Options of `up` and `plan` that override the settings of a model's family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
