"""`clawloop training`, `clawloop policy` and `clawloop recipe`: learning as an operator sees and steers it.

PostgreSQL is told first, and that is what counts; the training workflow is told next, if Temporal answers. Imports
what is heavy only when a verb runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.terminal import AsJson, Data, settings_of, show_facts, show_rows, when, with_database
from clawloop.errors import SignalFailed

if TYPE_CHECKING:
    from api.ports import Operations, TrainingStore
    from clawloop.contracts.training import TrainingView, VersionView
    from clawloop.settings import Settings
    from db.database import Database

training_app = typer.Typer(no_args_is_help=True, help="Learning: what it does now, and whether it may.")
policy_app = typer.Typer(no_args_is_help=True, help="Policies and their versions.")
recipe_app = typer.Typer(no_args_is_help=True, help="What a policy learns by.")

Policy = Annotated[str, typer.Option(help="Which policy.")]

# A server that listens takes a connection at once; a far one within some tenths of a second.
TEMPORAL_LOOK_SECONDS = 2.0


@training_app.command("status")
def training_status(policy: Policy = "default", data: Data = None, as_json: AsJson = False) -> None:
    """Say what learning does, and what it waits for."""
    _show(_look(data, policy), as_json)


@training_app.command("pause")
def pause_training(
    reason: Annotated[str, typer.Argument(help="For people; shown wherever training is.")],
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Claim no batch until resumed; a step that runs is finished. Holds whatever is restarted."""
    if not reason.strip():
        raise typer.BadParameter("say why", param_hint="REASON")
    done = _do(
        data,
        lambda store: store.pause(policy, reason),
        lambda operations: operations.pause(policy, reason),
    )
    _show(done, as_json)


@training_app.command("resume")
def resume_training(
    retry: Annotated[bool, typer.Option("--retry", help="Also take samples again that a bad step set aside.")] = False,
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Claim batches again."""
    done = _do(
        data,
        lambda store: store.resume(policy, retry_quarantined=retry),
        lambda operations: operations.resume(policy, retry),
    )
    _show(done, as_json)


@policy_app.command("list")
def list_policies(data: Data = None, as_json: AsJson = False) -> None:
    """Show the policies, and how learning of each stands."""
    from db.serving.directory import PostgresDirectoryStore
    from db.training.operators import PostgresTrainingStore

    async def look(database: Database) -> list[dict[str, str]]:
        directory = await PostgresDirectoryStore(database).read()
        store = PostgresTrainingStore(database)
        rows = []
        for policy in directory.policies:
            facts = _facts(await store.status(policy.id))
            rows.append({"policy": policy.id, "base model": policy.base_model, **facts})
        return rows

    show_rows(with_database(data, look), as_json)


@policy_app.command("versions")
def list_versions(
    policy: Annotated[str, typer.Argument(help="As `policy list` shows it.")] = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show all versions there ever were, and what their steps measured."""
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
    """Go on from an earlier version; a step that runs is abandoned, and its samples are free again."""
    done = _do(
        data,
        lambda store: store.roll_back(policy, version),
        lambda operations: operations.roll_back(policy, version),
    )
    _show(done, as_json)


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
    done = _do(
        data,
        lambda store: store.unpin(policy) if version is None else store.pin(policy, version),
        lambda operations: operations.pin(policy, version),
    )
    _show(done, as_json)


@recipe_app.command("show")
def show_recipe(policy: Policy = "default", data: Data = None, as_json: AsJson = False) -> None:
    """Print what the policy learns by, as TOML that `recipe set` takes."""
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
    """Let the policy learn by this recipe from the next step on.

    Samples that wait stay good while the recipe's [signal] part is the same; others expire at once, and for good:
    `recipe changed`. Holds whatever is restarted.
    """
    from clawloop.recipes.checks import require_rank
    from clawloop.recipes.recipe import load_recipe

    recipe = load_recipe(file)
    require_rank(recipe, settings_of(data).max_lora_rank)
    _do(
        data,
        lambda store: store.set_recipe(policy, recipe),
        lambda operations: operations.set_recipe(policy, recipe),
    )
    typer.echo(f"{policy} learns by {recipe.name} ({recipe.hash[:12]}).")


def _look(data: Path | None, policy: str) -> TrainingView:
    from db.training.operators import PostgresTrainingStore

    return with_database(data, lambda database: PostgresTrainingStore(database).status(policy))


def _do(
    data: Path | None,
    write: Callable[[TrainingStore], Awaitable[TrainingView]],
    tell: Callable[[Operations], Awaitable[None]],
) -> TrainingView:
    from db.training.operators import PostgresTrainingStore

    async def do(database: Database) -> TrainingView:
        view = await write(PostgresTrainingStore(database))
        try:
            await tell(await _operations(settings_of(data)))
        except SignalFailed as error:
            typer.echo(f"It holds; the training workflow sees it when it looks next ({error}).", err=True)
        return view

    return with_database(data, do)


async def _operations(settings: Settings) -> Operations:
    """What tells training workflows what an operator said.

    Whether anybody listens is asked before the client is imported, which takes a second or two: it would say the same
    in its transport's words.

    Raises:
        SignalFailed: there is no Temporal, or it does not answer.
    """
    from clawloop.processes.endpoints import temporal_address

    address = temporal_address(settings)
    if address is None:
        raise SignalFailed("no Temporal is given: set TEMPORAL_ADDRESS")
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TEMPORAL_LOOK_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        raise SignalFailed(f"Temporal does not answer at {address}") from None
    writer.close()
    from clawloop.temporal.client import connect
    from clawloop.temporal.training_notifier import TemporalTraining

    return TemporalTraining(await connect(address, lazy=True))


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
        "made": when(version.created_at),
    }


def _dotted(content: dict[str, object], above: str = "") -> list[tuple[str, object]]:
    """Dotted keys with their values, those of tables last."""
    found: list[tuple[str, object]] = []
    for name, value in content.items():
        key = f"{above}{name}"
        found += _dotted(value, f"{key}.") if isinstance(value, dict) else [(key, value)]
    return found
