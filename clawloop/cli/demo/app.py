"""`clawloop demo`: registers the demo's verbs."""

from __future__ import annotations

import typer

from clawloop.cli.demo.chat import chat_command
from clawloop.cli.demo.pretrain import pretrain_command
from clawloop.cli.demo.report import report_command
from clawloop.cli.demo.run import run_command
from clawloop.cli.terminal import settings_of
from clawloop.cli.up import prepare_deployment

demo_app = typer.Typer(no_args_is_help=True, help="A small model that learns while you watch.")


@demo_app.callback()
def demo() -> None:
    """A small model that learns while you watch."""


demo_app.command("pretrain")(pretrain_command)
demo_app.command("run")(run_command(lambda: settings_of(None), lambda: prepare_deployment))
demo_app.command("report")(report_command)
demo_app.command("chat")(chat_command(lambda: settings_of(None)))
