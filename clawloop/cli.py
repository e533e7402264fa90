"""The `clawloop` program: verbs for people and for process supervisors.

Heavy imports happen inside a verb, so that `--help` stays quick. Exit codes: 0 done, 1 a one-line reason was
printed, 2 wrong usage.
"""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.callback()
def clawloop() -> None:
    """A personal agent's model that gets better by being used."""


def main() -> None:
    app()
