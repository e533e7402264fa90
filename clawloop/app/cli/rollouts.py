"""`clawloop rollouts` and `clawloop episode`: agents that practise in sandboxes.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.operations import links_of, with_policy_operations
from clawloop.app.cli.terminal import (
    AsJson,
    Data,
    Policy,
    age,
    checked_reason,
    printable,
    settings_of,
    show_facts,
    show_json,
    show_table,
    when,
    with_database,
)
from clawloop.core.ids import short_form

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any
    from uuid import UUID

    from clawloop.core.contracts.answers import EpisodePage
    from clawloop.core.contracts.episodes import EpisodeView, KindView, RolloutsView
    from clawloop.core.contracts.views import SessionDetail
    from clawloop.core.settings import Settings
    from clawloop.operations.applied import Applied
    from clawloop.operations.rollouts import RolloutOperations
    from db.database import Database

rollouts_app = typer.Typer(no_args_is_help=True, help="Rollouts: groups of episodes that a policy learns from.")
episode_app = typer.Typer(no_args_is_help=True, help="Episodes: attempts of a policy at a task.")

More = Annotated[bool, typer.Option("--more", help="All of them.")]
_PAGE = 500
# A main agent and some side agents; what an episode of hundreds of sessions said is not read at once.
_SESSIONS = 5
_TURNS = 50


@rollouts_app.command("start")
def start_rollouts(
    environment: Annotated[
        str, typer.Option(help="Where the tasks come from: as its worker calls it, or a folder of Harbor tasks.")
    ],
    size: Annotated[int, typer.Option(min=2, max=1024, help="Episodes of a group, which are compared.")] = 8,
    groups: Annotated[int, typer.Option(min=1, max=1024, help="Groups in flight.")] = 2,
    barren: Annotated[int, typer.Option(min=1, help="Pause after this many groups in a row without a sample.")] = 20,
    curriculum: Annotated[
        bool, typer.Option("--curriculum", help="Let success decide which kinds of tasks come, and how hard.")
    ] = False,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start rollouts, or continue them by these settings. Needs `clawloop worker environment`."""
    from clawloop.core.contracts.episodes import RolloutsPlan

    plan = RolloutsPlan(_environment_name(environment), size, groups, barren, curriculum)
    _show(_apply(data, policy, lambda rollouts, name: rollouts.start(name, plan)), as_json)


def _environment_name(environment: str) -> str:
    """The name; of a folder of Harbor tasks its own, after a line for each task that no worker can read.

    Raises:
        SetupError: the folder has no task that can be read.
    """
    from clawloop.environments.harbor import environment_name, read_tasks

    folder = Path(environment).expanduser()
    is_path = environment.startswith(("/", ".", "~"))
    if not is_path and not (folder / "task.toml").is_file() and not any(folder.glob("*/task.toml")):
        return environment
    tasks, problems = read_tasks(folder)
    for problem in problems:
        typer.echo(printable(f"left out: {problem}"), err=True)
    if problems:
        typer.echo(f"{len(tasks)} of {len(tasks) + len(problems)} tasks can be read", err=True)
    return environment_name(folder)


@rollouts_app.command("pause")
def pause_rollouts(
    reason: Annotated[str, typer.Argument(callback=checked_reason, help="For people; shown with the state.")],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start no group until `rollouts start`; groups in flight are finished. Holds across restarts."""
    _show(_apply(data, policy, lambda rollouts, name: rollouts.pause(name, reason)), as_json)


@rollouts_app.command("status")
def rollouts_status(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Show the state of a policy's rollouts, and what they wait for."""
    _show(with_policy_operations(data, policy, lambda operations, name: operations.rollouts.status(name)), as_json)


@rollouts_app.command("groups")
def list_groups(
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 20,
    more: More = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show rollout groups, newest first, each with its result and mean reward."""
    from clawloop.core.contracts.answers import GroupPage
    from clawloop.operations.rollouts import group_page
    from db.episodes.groups import PostgresEpisodeStore

    async def read(database: Database) -> GroupPage:
        store = PostgresEpisodeStore(database)
        page = await group_page(store, policy=policy, limit=_PAGE if more else limit)
        while more and page.next is not None:
            further = await group_page(store, policy=policy, after=page.next, limit=_PAGE)
            page = further.model_copy(update={"groups": [*page.groups, *further.groups]})
        return page

    found = with_database(data, read)
    if as_json:
        show_json(found)
        return
    rows = [
        {
            "group": short_form(group.id, *(other.id for other in found.groups if other.id != group.id)),
            "age": age(group.created_at),
            "state": group.state,
            "scored": "" if group.scored is None else f"{group.scored} of {group.size}",
            "reward": "" if group.mean_reward is None else f"{group.mean_reward:.3g}",
            "task and why": f"{group.task}: {group.reason}" if group.reason else group.task,
        }
        for group in found.groups
    ]
    show_table(rows)
    _note_more(len(found.groups), found.next)


@episode_app.command("list")
def list_episodes(
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    group: Annotated[str | None, typer.Option(help="Only of this rollout group, by its id or its beginning.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 20,
    more: More = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show episodes, newest first: how each ended, its reward, and what was trained."""
    from clawloop.operations.rollouts import episode_page
    from db.episodes.groups import PostgresEpisodeStore

    async def read(database: Database) -> EpisodePage:
        store = PostgresEpisodeStore(database)
        of_group = None if group is None else await store.find_group(group)
        page = await episode_page(store, policy=policy, group=of_group, limit=_PAGE if more else limit)
        while more and page.next is not None:
            further = await episode_page(store, policy=policy, group=of_group, after=page.next, limit=_PAGE)
            page = further.model_copy(update={"episodes": [*page.episodes, *further.episodes]})
        return page

    found = with_database(data, read)
    if as_json:
        show_json(found)
        return
    rows = [
        {
            # Ids begin with their time: of two that a group starts at once, the first half is the same.
            "episode": short_form(episode.id, *(other.id for other in found.episodes if other.id != episode.id)),
            "age": age(episode.started_at),
            "ending": str(episode.state if episode.ending is None else episode.ending),
            "reward": "" if episode.reward is None else f"{episode.reward:g}",
            "turns": f"{episode.turns}, {episode.trained} trained",
            "task and why": f"{episode.task}: {episode.reason}" if episode.reason else episode.task,
        }
        for episode in found.episodes
    ]
    show_table(rows)
    _note_more(len(found.episodes), found.next)


@episode_app.command("show")
def show_episode(
    episode: Annotated[str, typer.Argument(help="An id or its beginning, as `episode list` shows it, or last.")],
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show one episode: how it ended, its reward, and what was said, with the outcome of each reply and its reason."""
    from clawloop.app.cli.conversation import conversation_lines
    from clawloop.operations.reading import Reading
    from clawloop.operations.rollouts import found_episode
    from db.episodes.groups import PostgresEpisodeStore
    from db.turns.sessions import PostgresSessionStore

    async def read(database: Database) -> tuple[EpisodeView, list[SessionDetail]]:
        found = await found_episode(PostgresEpisodeStore(database), episode)
        reading = Reading(PostgresSessionStore(database))
        shown = [] if as_json else found.sessions[:_SESSIONS]
        return found, [await reading.session(str(each), limit=_TURNS, content=True) for each in shown]

    found, sessions = with_database(data, read)
    if as_json:
        show_json(found)
        return
    workflow = links_of(data).named(f"rollout-group/{found.group}")
    show_facts(_facts(found) | {"workflow": workflow})
    for session in sessions:
        typer.echo("")
        for line in conversation_lines(session, full=full):
            typer.echo(line)
        if session.earlier is not None:
            more = f"clawloop session show {session.session.short_id} --more"
            typer.echo(f"\nthe newest {len(session.turns)} turns: {more}")
    if left := len(found.sessions) - len(sessions):
        typer.echo(f"\nand {left} more sessions: --json names them, `clawloop session show` shows each")
    for line in _changed_files(found, settings_of(data)):
        typer.echo(printable(line))


def _changed_files(episode: EpisodeView, settings: Settings) -> list[str]:
    """The files that the agent changed as a diff, or why they are not shown; empty where nothing was kept."""
    from clawloop.app.processes.database import sealer_of
    from clawloop.core.errors import NotFound
    from clawloop.environments.artifacts import ArtifactFolder
    from clawloop.environments.choice import found_by_agent
    from clawloop.operations.file_changes import changes_in

    artifacts = ArtifactFolder(settings.data / "artifacts", sealer_of(settings.encryption_key_file))
    try:
        changes = asyncio.run(changes_in(episode, artifacts.load, found_by_agent))
    except NotFound as error:
        return ["", str(error)]
    if changes is None:
        return []
    lines = ["", "Files that the agent changed" if changes.compared else "Files that the agent left"]
    for file in changes.files:
        lines += [f"{file.path}: {file.change}", *(["no text, or too long"] if file.lines is None else file.lines)]
    if changes.more:
        lines.append(f"and {changes.more} more")
    return lines


def _note_more(shown: int, further: UUID | None) -> None:
    if further is not None:
        typer.echo(f"the newest {shown}, --more")


def _apply(
    data: Path | None,
    policy: str | None,
    change: Callable[[RolloutOperations, str], Coroutine[Any, Any, Applied[RolloutsView]]],
) -> RolloutsView:
    applied = with_policy_operations(data, policy, lambda operations, name: change(operations.rollouts, name))
    if applied.signal_error is not None:
        typer.echo(f"stored; its workflow was not notified: {applied.signal_error}", err=True)
    return applied.result


def _show(view: RolloutsView, as_json: bool) -> None:
    if as_json:
        show_json(view)
        return
    facts = {"policy": view.policy, "state": str(view.state), "reason": view.reason}
    if view.no_worker:
        facts["problem"] = view.no_worker
    if view.plan is not None:
        facts["environment"] = view.plan.environment
        facts["group size"] = str(view.plan.size)
        facts["groups"] = f"{view.in_flight} of {view.plan.groups} in flight"
    facts["finished"] = f"{view.settled} settled, {view.dropped} dropped"
    facts["reward"] = "" if view.recent_reward is None else f"{view.recent_reward:.3f} in the last 20 groups"
    if view.plan is not None and view.plan.curriculum:
        facts["curriculum"] = f"{len(view.curriculum)} kinds of tasks"
    show_facts(facts)
    if view.curriculum:
        typer.echo("")
        show_table([_kind(kind) for kind in view.curriculum])


def _kind(kind: KindView) -> dict[str, str]:
    return {
        "kind": kind.kind,
        "level": f"{kind.level} of {kind.hardest}" + (" on trial" if kind.trial_of is not None else ""),
        "weight": f"{kind.weight:g}",
        "success": "" if kind.success is None else f"{kind.success:.2f}",
        "counted": f"{kind.scored} of {kind.needed}" if kind.scored < kind.needed else str(kind.scored),
        "why": kind.why,
    }


def _facts(episode: EpisodeView) -> dict[str, str]:
    return {
        "episode": str(episode.id),
        "task": episode.task,
        "place": f"{episode.place}, attempt {episode.attempt}",
        "state": str(episode.state),
        "ending": "" if episode.ending is None else str(episode.ending),
        "reward": "" if episode.reward is None else f"{episode.reward:g}",
        "advantage": "" if episode.advantage is None else f"{episode.advantage:+.2f}",
        "turns": f"{episode.turns}, {episode.trained} trained",
        "tokens": str(episode.tokens),
        "why": episode.reason or "",
        "began": when(episode.started_at),
        "group": str(episode.group),
        "environment": episode.environment,
        "policy": episode.policy,
        "ended": when(episode.ended_at),
        "artifact": episode.artifact_sha256 or "",
    }
