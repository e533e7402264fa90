"""`clawloop training`, `clawloop policy` and `clawloop recipe`: shows and changes training.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawloop.cli.operations import with_operations
from clawloop.cli.terminal import AsJson, Data, show_facts, show_rows, when, with_database

if TYPE_CHECKING:
    from clawloop.contracts.training import TrainingView, VersionView
    from clawloop.operations.applied import Applied
    from clawloop.operations.training import TrainingOperations
    from db.database import Database

training_app = typer.Typer(no_args_is_help=True, help="Training: its state, pause and resume.")
policy_app = typer.Typer(no_args_is_help=True, help="Policies and their versions.")
recipe_app = typer.Typer(no_args_is_help=True, help="A policy's recipe.")

Policy = Annotated[str, typer.Option(help="Which policy.")]


@training_app.command("status")
def training_status(policy: Policy = "default", data: Data = None, as_json: AsJson = False) -> None:
    """Show the state of training, and what it waits for."""
    from db.training.operators import PostgresTrainingStore

    _show(with_database(data, lambda database: PostgresTrainingStore(database).status(policy)), as_json)


@training_app.command("pause")
def pause_training(
    reason: Annotated[str, typer.Argument(help="For people; shown with the state of training.")],
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Claim no batch until resumed; a running step is finished. Holds across restarts."""
    if not reason.strip():
        raise typer.BadParameter("give a reason", param_hint="REASON")
    _show(_apply(data, lambda training: training.pause(policy, reason)), as_json)


@training_app.command("resume")
def resume_training(
    retry: Annotated[bool, typer.Option("--retry", help="Also take samples that a bad step quarantined.")] = False,
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Claim batches again."""
    _show(_apply(data, lambda training: training.resume(policy, retry=retry)), as_json)


@policy_app.command("list")
def list_policies(data: Data = None, as_json: AsJson = False) -> None:
    """Show the policies, each with the state of its training."""
    from db.serving.directory import PostgresDirectoryStore
    from db.training.operators import PostgresTrainingStore

    async def read(database: Database) -> list[dict[str, str]]:
        directory = await PostgresDirectoryStore(database).read()
        store = PostgresTrainingStore(database)
        rows = []
        for policy in directory.policies:
            facts = _facts(await store.status(policy.id))
            rows.append({"policy": policy.id, "base model": policy.base_model, **facts})
        return rows

    show_rows(with_database(data, read), as_json)


@policy_app.command("create")
def create_policy(
    name: Annotated[str, typer.Argument(help="Small letters, digits, `.`, `_` and `-`.")],
    recipe: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="What it learns by; default: as --base-policy.")
    ] = None,
    base_policy: Annotated[str, typer.Option(help="The policy whose base model, aliases and sampling it has.")] = (
        "default"
    ),
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a policy that begins at the base model; `key create --policy NAME` makes keys for it."""
    from clawloop.recipes.recipe import load_recipe

    learned_by = None if recipe is None else load_recipe(recipe)

    async def create(training: TrainingOperations) -> TrainingView:
        checked = None if learned_by is None else training.check_recipe(learned_by)
        return await training.create_policy(name, base_policy, checked)

    _show(with_operations(data, lambda operations: create(operations.training)), as_json)


@policy_app.command("versions")
def list_versions(
    policy: Annotated[str, typer.Argument(help="As `policy list` shows it.")] = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show all versions, also those rejected or rolled back, with their steps' metrics and what the gate found."""
    from db.training.operators import PostgresTrainingStore

    versions = with_database(data, lambda database: PostgresTrainingStore(database).versions(policy))
    show_rows([_version_row(version) for version in versions], as_json)


@policy_app.command("roll-back")
def roll_back(
    version: Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="As `policy versions` shows it.")],
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Go on from an earlier version; a running step is abandoned, and its samples are fresh again."""
    _show(_apply(data, lambda training: training.roll_back(policy, version)), as_json)


@policy_app.command("release")
def release(
    version: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="A rejected one of `policy versions`.")],
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Accept a version that the gate rejected, and go on from it; an open step is abandoned."""
    _show(_apply(data, lambda training: training.release(policy, version)), as_json)


@policy_app.command("pin")
def pin(
    version: Annotated[int | None, typer.Argument(min=0, max=2**31 - 1, help="It answers whatever is trained.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Let the newest version answer again.")] = False,
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Let one version answer whatever is trained, or with --none the newest again."""
    if (version is None) != none:
        raise typer.BadParameter("give a version, or --none", param_hint="VERSION")
    _show(_apply(data, lambda training: training.pin(policy, version)), as_json)


@recipe_app.command("show")
def show_recipe(policy: Policy = "default", data: Data = None, as_json: AsJson = False) -> None:
    """Print the policy's recipe, as TOML that `recipe set` takes."""
    from db.training.operators import PostgresTrainingStore

    recipe = with_database(data, lambda database: PostgresTrainingStore(database).recipe(policy))
    content = recipe.model_dump(mode="json", exclude_none=True)
    if as_json:
        typer.echo(json.dumps(content))
        return
    for name, value in _dotted(content):
        typer.echo(f"{name} = {json.dumps(value)}")


@recipe_app.command("set")
def set_recipe(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="See deploy/recipes.")],
    policy: Policy = "default",
    data: Data = None,
) -> None:
    """Use this recipe from the next step on.

    Waiting samples stay fresh while the recipe's [signal] part is the same; others expire at once, for good: `recipe
    changed`. Holds across restarts.
    """
    from clawloop.recipes.recipe import load_recipe

    recipe = load_recipe(file)
    _apply(data, lambda training: training.set_recipe(policy, training.check_recipe(recipe)))
    typer.echo(f"{policy} learns by {recipe.name} ({recipe.hash[:12]}).")


def _apply(
    data: Path | None, change: Callable[[TrainingOperations], Coroutine[Any, Any, Applied[TrainingView]]]
) -> TrainingView:
    applied = with_operations(data, lambda operations: change(operations.training))
    if applied.signal_error is not None:
        reason = applied.signal_error
        typer.echo(
            f"The change holds; the training workflow sees it when it reads the ledger next ({reason}).", err=True
        )
    return applied.result


def _show(view: TrainingView, as_json: bool) -> None:
    show_facts({"policy": view.policy, **_facts(view)}, as_json)


def _facts(view: TrainingView) -> dict[str, str]:
    return {
        "state": view.state,
        "reason": view.reason,
        "samples": f"{view.ready} of {view.needed}",
        "judging": str(view.judging),
        "step": str(view.step),
        "version": f"{view.version}{' (pinned)' if view.pinned is not None else ''}",
        "head": str(view.head),
    }


def _version_row(version: VersionView) -> dict[str, str]:
    metrics = version.metrics or {}

    def figure(name: str) -> str:
        value = metrics.get(name)
        return f"{value:.4g}" if isinstance(value, int | float) else ""

    return {
        "version": str(version.n),
        "parent": "" if version.parent is None else str(version.parent),
        "state": version.state,
        "engines": " ".join(version.engines),
        "samples": figure("samples"),
        "loss": figure("loss"),
        "kl": figure("kl"),
        "ratio": figure("ratio"),
        "seconds": figure("seconds"),
        "gate": "; ".join(f"{check.name} {check.result.replace('_', ' ')}: {check.reason}" for check in version.gate),
        "made": when(version.created_at),
    }


def _dotted(content: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Dotted keys with their values."""
    pairs: list[tuple[str, object]] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        pairs += _dotted(value, f"{key}.") if isinstance(value, dict) else [(key, value)]
    return pairs
