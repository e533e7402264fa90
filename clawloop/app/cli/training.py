"""`clawloop training`, `clawloop policy` and `clawloop recipe`: shows and changes training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawloop.app.cli.gateway_request import Url, gateway_address, kept_key, post
from clawloop.app.cli.operations import links_of, with_policy_operations
from clawloop.app.cli.plan import model_folder
from clawloop.app.cli.terminal import (
    AsJson,
    Data,
    Policy,
    age,
    checked_reason,
    doing,
    printable,
    running_settings,
    show_facts,
    show_json,
    show_table,
    with_database,
    with_policy,
    wrapped,
)
from clawloop.core.errors import PermanentError, SetupError

if TYPE_CHECKING:
    from clawloop.core.contracts.answers import Comparison, PolicyEvent, TrainedReply, TrainingStatus, VersionDetail
    from clawloop.core.contracts.training import BroughtAdapter, TrainingView, VersionView
    from clawloop.operations.applied import Applied
    from clawloop.operations.training import TrainingOperations
    from db.database import Database


# Training -------------------------------------------------------------------------------------------------------------
# `clawloop training`, `clawloop policy` and `clawloop recipe`: shows and changes training.
#
# Heavy imports happen inside a verb.

training_app = typer.Typer(no_args_is_help=True, help="Training: its state, pause and resume.")
policy_app = typer.Typer(no_args_is_help=True, help="Policies and their versions.")
recipe_app = typer.Typer(no_args_is_help=True, help="A policy's recipe.")

_VERSIONS = 20


@training_app.command("status")
def training_status(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Show the state of training, and what it waits for."""
    from db.training.operators import PostgresTrainingStore

    _show(with_policy(data, policy, lambda database, name: PostgresTrainingStore(database).status(name)), data, as_json)


@training_app.command("liked")
def training_liked(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Show whether the trained versions' replies are liked better than version 0's were."""
    from clawloop.core.contracts.answers import Liked
    from clawloop.core.judging.progress import MIN_CHATS, REPLIES, progress_of
    from db.training.status import PostgresTrainingBrowser

    async def read(database: Database, name: str) -> Liked:
        browser = PostgresTrainingBrowser(database)
        base, newest = await browser.base_replies(name, REPLIES), await browser.replies(name, REPLIES)
        return Liked.of(name, progress_of(base, newest))

    liked = with_policy(data, policy, read)
    if as_json:
        show_json(liked)
        return
    better = "not certain" if liked.better is None else "yes" if liked.better else "no, worse"
    facts = {"policy": liked.policy, "better": better}
    facts |= {"good replies": _liked(liked.share, liked.chats, "trained versions")}
    facts |= {"before": _liked(liked.base_share, liked.base_chats, "version 0")}
    if liked.low is None or liked.high is None:
        facts["change"] = f"{MIN_CHATS} judged chats of each are needed"
    else:
        facts["change"] = f"95 % interval {100 * liked.low:+.0f} to {100 * liked.high:+.0f} points"
    show_facts(facts)


def _liked(share: float | None, chats: int, whose: str) -> str:
    told = "" if share is None else f"{share:.0%}, "
    return f"{told}{chats} judged chats with {whose}"


@training_app.command("pause")
def pause_training(
    reason: Annotated[
        str, typer.Argument(callback=checked_reason, help="For people; shown with the state of training.")
    ],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start no training step until resumed; a running one is finished. Holds across restarts."""
    _show(_apply(data, policy, lambda training, name: training.pause(name, reason)), data, as_json)


@training_app.command("resume")
def resume_training(
    retry: Annotated[bool, typer.Option("--retry", help="Also take samples that a bad step quarantined.")] = False,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start training steps again."""
    _show(_apply(data, policy, lambda training, name: training.resume(name, retry=retry)), data, as_json)


@policy_app.command("list")
def list_policies(data: Data = None, as_json: AsJson = False) -> None:
    """Show the policies, each with the state of its training."""
    from clawloop.core.contracts.answers import PolicyList, PolicyStatus, TrainingStatus
    from db.serving.directory import PostgresDirectoryStore
    from db.training.operators import PostgresTrainingStore

    async def read(database: Database) -> PolicyList:
        directory = await PostgresDirectoryStore(database).read()
        store = PostgresTrainingStore(database)
        policies = [
            PolicyStatus(
                policy=policy.id,
                base_model=policy.base_model,
                aliases=policy.aliases,
                training=TrainingStatus.of(await store.status(policy.id)),
            )
            for policy in directory.policies
        ]
        return PolicyList(policies=policies)

    found = with_database(data, read)
    if as_json:
        show_json(found)
        return
    rows = [
        {
            "policy": policy.policy,
            "version": _version(policy.training),
            "step": str(policy.training.step),
            "state": policy.training.state,
            "base model": policy.base_model,
            "reason": policy.training.reason,
        }
        for policy in found.policies
    ]
    show_table(rows)


@policy_app.command("create")
def create_policy(
    name: Annotated[str, typer.Argument(help="Small letters, digits, `.`, `_` and `-`.")],
    recipe: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="What it learns by; default: as --base-policy.")
    ] = None,
    base_policy: Annotated[str, typer.Option(help="The policy whose base model, aliases and sampling it has.")] = (
        "default"
    ),
    version: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Begin from this version of --base-policy; 0: the base model.")
    ] = 0,
    adapter: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Begin from this LoRA adapter, in PEFT's form, instead."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --adapter: the base model, as for `up`; default: CLAWLOOP_MODEL."),
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a policy that begins at the base model, from a version of another policy, or from an adapter you have.

    `key create --policy NAME` makes keys for it.
    """
    from clawloop.core.recipes.recipe import load_recipe

    learned_by = None if recipe is None else load_recipe(recipe)
    if adapter is not None and version:
        raise SetupError("--adapter and --version: a policy begins from one of them")
    brought, written = (None, None) if adapter is None else _bring(adapter, model, name, data)

    async def create(training: TrainingOperations, name: str) -> Applied[TrainingView]:
        checked = None if learned_by is None else training.check_recipe(learned_by)
        return await training.create_policy(name, base_policy, checked, version, brought)

    try:
        view = _apply(data, name, create)
    except PermanentError:  # no policy begins from these files
        if written is not None:
            shutil.rmtree(written)
        raise
    _show(view, data, as_json)
    if not as_json:
        typer.echo(f"next       a chat key for it: clawloop key create --policy {name}")


def _bring(adapter: Path, model: str | None, policy: str, data: Path | None) -> tuple[BroughtAdapter, Path | None]:
    """The adapter as the first version of a policy, in the data folder; its directory, unless it was there before."""
    from clawloop.operations.training import check_policy_name
    from clawloop.training.adapters.brought import bring_adapter

    settings = running_settings(data)
    base_model = model or settings.model
    if base_model is None:
        raise SetupError("--adapter: give --model MODEL, the base model, or set CLAWLOOP_MODEL")
    base = model_folder(base_model, settings.data / "models")
    adapters, name = (settings.data / "adapters").resolve(), check_policy_name(policy)
    before = set((adapters / name).glob("*"))
    brought = bring_adapter(adapter, base.resolve(), base.name, adapters, name)
    written = adapters / brought.path
    return brought, None if written in before else written


@policy_app.command("retire")
def retire_policy(
    name: Annotated[str, typer.Argument(help="As `policy list` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """End a policy for good: its keys are revoked, it learns no more, and engines unload its versions.

    Its sessions and what they taught stay in the database, and its newest versions on the disk.
    """
    if not yes:
        typer.confirm(f"Revoke all keys of {name} and end its learning for good?", abort=True)
    _show(_apply(data, name, lambda training, name: training.retire_policy(name)), data, as_json)


@policy_app.command("versions")
def list_versions(
    policy: Policy = None,
    full: Annotated[bool, typer.Option("--more", help="All of them.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show all versions, also those rejected or rolled back, with their steps' metrics and the gate's results."""
    from db.training.operators import PostgresTrainingStore

    versions = with_policy(data, policy, lambda database, name: PostgresTrainingStore(database).versions(name))
    if as_json:
        from clawloop.core.contracts.answers import VersionList

        show_json(VersionList(versions=versions))
        return
    if not full:
        versions = versions[-_VERSIONS:]
    show_table([_version_row(version) for version in versions])
    if versions and versions[0].n > 0:
        typer.echo(f"the newest {len(versions)} of {versions[-1].n + 1}, --more")


@policy_app.command("version")
def show_version(
    version: Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="As `policy versions` shows it.")],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show one version: its gate, its step, and the replies it was trained on."""
    from clawloop.operations.training import version_detail
    from db.training.operators import PostgresTrainingStore
    from db.training.status import PostgresTrainingBrowser

    async def read(database: Database, name: str) -> VersionDetail:
        return await version_detail(PostgresTrainingStore(database), PostgresTrainingBrowser(database), name, version)

    detail = with_policy(data, policy, read)
    if as_json:
        show_json(detail)
        return
    made = _version_row(detail.version)
    show_facts(made | {"led to": ", ".join(map(str, detail.children)), "engines": ", ".join(detail.version.engines)})
    if detail.batch:
        typer.echo("")
        show_table([_reply_row(reply) for reply in detail.batch])


@policy_app.command("roll-back")
def roll_back(
    version: Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="As `policy versions` shows it.")],
    recipe: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Learn by it from then on; default: as before.")
    ] = None,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Go on from an earlier version; a running step is dropped, and a later one uses its samples.

    With --recipe no step by the recipe before begins from the version.
    """
    from clawloop.core.recipes.recipe import load_recipe

    learned_by = None if recipe is None else load_recipe(recipe)

    async def change(training: TrainingOperations, name: str) -> Applied[TrainingView]:
        return await training.roll_back(
            name, version, None if learned_by is None else training.check_recipe(learned_by)
        )

    view = _apply(data, policy, change)
    if as_json:
        _show(view, data, as_json)
        return
    answers = "answers now" if view.version == version else "answers once an engine has loaded it"
    typer.echo(f"Training of {view.policy} goes on from version {version}, which {answers}.")
    typer.echo("Later versions are kept: `clawloop policy versions` shows them, and roll-back leads to them as well.")


@policy_app.command("release")
def release(
    version: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="A rejected one of `policy versions`.")],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Accept a version that the gate rejected, and go on from it; an open step is abandoned."""
    _show(_apply(data, policy, lambda training, name: training.release(name, version)), data, as_json)


@policy_app.command("pin")
def pin(
    version: Annotated[int | None, typer.Argument(min=0, max=2**31 - 1, help="It answers whatever is trained.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Let the newest version answer again.")] = False,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Pin a version, so that it answers whatever is trained; --none unpins it."""
    if (version is None) != none:
        raise typer.BadParameter("give a version, or --none", param_hint="VERSION")
    _show(_apply(data, policy, lambda training, name: training.pin(name, version)), data, as_json)


@recipe_app.command("show")
def show_recipe(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Print the policy's recipe, as TOML that `recipe set` takes."""
    from clawloop.core.recipes.recipe import toml_of
    from db.training.operators import PostgresTrainingStore

    recipe = with_policy(data, policy, lambda database, name: PostgresTrainingStore(database).recipe(name))
    if as_json:
        show_json(recipe)
        return
    typer.echo(toml_of(recipe), nl=False)


@recipe_app.command("set")
def set_recipe(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="See deploy/recipes.")],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Use this recipe from the next step on.

    Waiting samples stay fresh while the recipe's [signal] part is the same; others expire at once, for good: `recipe
    changed`. Holds across restarts.
    """
    from clawloop.core.recipes.recipe import load_recipe

    recipe = load_recipe(file)
    view = _apply(data, policy, lambda training, name: training.set_recipe(name, training.check_recipe(recipe)))
    if as_json:
        _show(view, data, as_json)
        return
    typer.echo(f"{view.policy} learns by {recipe.name} ({recipe.hash[:12]}).")


def _apply(
    data: Path | None,
    policy: str | None,
    change: Callable[[TrainingOperations, str], Coroutine[Any, Any, Applied[TrainingView]]],
) -> TrainingView:
    applied = with_policy_operations(data, policy, lambda operations, name: change(operations.training, name))
    if applied.signal_error is not None:
        reason = applied.signal_error
        typer.echo(
            f"The change holds; the training workflow sees it when it reads the ledger next ({reason}).", err=True
        )
    return applied.result


def _show(view: TrainingView, data: Path | None, as_json: bool) -> None:
    from clawloop.core.contracts.answers import TrainingStatus

    status = TrainingStatus.of(view)
    if as_json:
        show_json(status)
        return
    show_facts(
        {
            "policy": status.policy,
            "state": status.state,
            "reason": status.reason,
            "now": doing(status.progress) or "nothing",
            "samples": f"{status.ready} wait; a step takes {status.needed}",
            "judging": str(status.judging),
            "step": str(status.step),
            "version": _version(status),
            "head": str(status.head),
            "workflow": links_of(data).named(f"training/{status.policy}"),
        }
    )


def _version(status: TrainingStatus) -> str:
    if status.pinned is None:
        return str(status.version)
    if status.pinned == status.version:
        return f"{status.version} (pinned)"
    return f"{status.version}; {status.pinned} is pinned and is being loaded"


def _reply_row(reply: TrainedReply) -> dict[str, str]:
    from clawloop.core.turns.titles import title_of

    return {
        "turn": f"{str(reply.session_id)[:8]}:{reply.number}{' again' if reply.practice_of else ''}",
        "by": f"v{reply.answered_by}",
        "verdict": "" if reply.verdict is None else f"{reply.verdict:+d}",
        "reward": "" if reply.reward is None else f"{reply.reward:+.3g}",
        "left out": reply.dropped or "",
        "hint or request": reply.hints[0].text if reply.hints else title_of(list(reply.added)) or "",
    }


def _version_row(version: VersionView) -> dict[str, str]:
    metrics = version.metrics or {}
    samples, loss = metrics.get("samples"), metrics.get("loss")
    gate = "; ".join(f"{check.name} {check.result.replace('_', ' ')}: {check.reason}" for check in version.gate)
    took = "" if version.gate_seconds is None else f"its gate took {version.gate_seconds:.3g} s"
    measured = "" if version.match is None else f"match {version.match:.0%}"
    origin = "" if version.origin is None else f"begun as version {version.origin.n} of {version.origin.policy}"
    return {
        "version": str(version.n),
        "parent": "" if version.parent is None else str(version.parent),
        "age": age(version.created_at),
        "samples": f"{samples:g}" if isinstance(samples, int | float) else "",
        "loss": f"{loss:.4g}" if isinstance(loss, int | float) else "",
        "state and gate": "; ".join(each for each in (version.state, measured, origin, gate, took) if each),
    }


# Versions and events --------------------------------------------------------------------------------------------------
# `clawloop policy compare` and `policy events`: why it answers as it does. Heavy imports happen inside a verb.

# Eight prompts, each answered twice with 512 tokens, on an engine of ten tokens a second.
_COMPARE_SECONDS = 900.0
_INDENT = "    "


def compare_version(
    version: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="As `policy versions` shows it.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask both this; repeatable. Default: what was asked in replies that it was trained on."),
    ] = None,
    other: Annotated[
        int | None,
        typer.Option("--with", min=0, max=2**31 - 1, help="The version to compare with; default: its parent."),
    ] = None,
    policy: Policy = None,
    url: Url = None,
    key: Annotated[
        str | None, typer.Option(help="An admin key; by default the one that `up` made in the data folder.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Ask a version and its parent, or another, the same prompts, and show both answers. Needs a running gateway."""
    from urllib.parse import quote

    from clawloop.core.contracts.answers import Comparison

    if policy is None:  # another machine's gateway does not say which policy has chats
        policy = "default" if url is not None else with_policy(data, None, _named)
    path = f"/admin/v1/policies/{quote(policy, safe='')}/versions/{version}/compare"
    asked = {"prompts": prompt or None, "other": other}
    body = {name: value for name, value in asked.items() if value is not None}
    found = Comparison.model_validate(
        post(gateway_address(url, data), path, body, key or kept_key(data, "admin"), _COMPARE_SECONDS)
    )
    if as_json:
        show_json(found)
        return
    for line in _lines(found):
        typer.echo(line)


async def _named(database: Database, policy: str) -> str:
    return policy


def _lines(found: Comparison) -> Iterator[str]:
    for number, compared in enumerate(found.prompts):
        if number:
            yield ""
        yield from wrapped(f"asked: {compared.prompt}", "")
        for answer in compared.answers:
            parent = ", its parent" if answer.version == found.parent else ""
            yield f"-- version {answer.version}{parent}"
            said = answer.text or "(nothing)" if answer.problem is None else f"no answer: {answer.problem}"
            yield from wrapped(said, _INDENT)
        first, *others = [answer.text for answer in compared.answers]
        if first is not None and others == [first]:
            yield "-- both answered the same, word for word"


def list_events(
    policy: Policy = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest ones.")] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a policy's events, newest first: roll-backs, pauses, recipes, rejected versions."""
    from clawloop.core.contracts.answers import EventList
    from db.training.operators import PostgresTrainingStore
    from db.training.status import PostgresTrainingBrowser

    async def read(database: Database, name: str) -> EventList:
        await PostgresTrainingStore(database).status(name)  # there must be such a policy
        return EventList(events=await PostgresTrainingBrowser(database).events(name, limit))

    found = with_policy(data, policy, read)
    if as_json:
        show_json(found)
        return
    show_table([_event_row(event) for event in found.events])
    if len(found.events) == limit:
        typer.echo(f"the newest {limit}, --limit shows more")


def _event_row(event: PolicyEvent) -> dict[str, str]:
    detail = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in event.detail.items() if value is not None)
    return {"age": age(event.at), "what": event.kind.replace("_", " "), "detail": printable(detail)}
