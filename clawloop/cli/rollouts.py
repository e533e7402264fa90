"""`clawloop rollouts` and `clawloop episode`: agents that practise in sandboxes.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.operations import links_of, with_operations
from clawloop.cli.show import age, show_facts, show_json, show_table, when
from clawloop.cli.terminal import AsJson, Data, with_database
from clawloop.ids import short_form

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from clawloop.contracts.episodes import EpisodeView, RolloutsView
    from clawloop.operations.applied import Applied
    from clawloop.operations.rollouts import RolloutOperations
    from db.database import Database

rollouts_app = typer.Typer(no_args_is_help=True, help="Rollouts: groups of episodes that a policy learns from.")
episode_app = typer.Typer(no_args_is_help=True, help="Episodes: attempts of a policy at a task.")

Policy = Annotated[str, typer.Option(help="Which policy.")]


@rollouts_app.command("start")
def start_rollouts(
    environment: Annotated[str, typer.Option(help="Where the tasks come from, as its worker calls it.")],
    size: Annotated[int, typer.Option(min=2, max=1024, help="Episodes of a group, which are compared.")] = 8,
    groups: Annotated[int, typer.Option(min=1, max=1024, help="Groups in flight.")] = 2,
    barren: Annotated[int, typer.Option(min=1, help="Pause after this many groups in a row without a sample.")] = 20,
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start rollouts, or continue them by these settings. Needs `clawloop worker environment`."""
    from clawloop.contracts.episodes import RolloutsPlan

    plan = RolloutsPlan(environment, size, groups, barren)
    _show(_apply(data, lambda rollouts: rollouts.start(policy, plan)), as_json)


@rollouts_app.command("pause")
def pause_rollouts(
    reason: Annotated[str, typer.Argument(help="For people; shown with the state.")],
    policy: Policy = "default",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Start no group until `rollouts start`; groups in flight are finished. Holds across restarts."""
    if not reason.strip():
        raise typer.BadParameter("give a reason", param_hint="REASON")
    _show(_apply(data, lambda rollouts: rollouts.pause(policy, reason)), as_json)


@rollouts_app.command("status")
def rollouts_status(policy: Policy = "default", data: Data = None, as_json: AsJson = False) -> None:
    """Show the state of a policy's rollouts, and what they wait for."""
    from db.episodes.rollouts import PostgresRolloutStore

    _show(with_database(data, lambda database: PostgresRolloutStore(database).status(policy)), as_json)


@episode_app.command("list")
def list_episodes(
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    group: Annotated[str | None, typer.Option(help="Only of this rollout group, by its id or its beginning.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show episodes, newest first: how each ended, its reward, and what was trained."""
    from clawloop.contracts.answers import EpisodePage
    from db.episodes.groups import PostgresEpisodeStore

    async def read(database: Database) -> EpisodePage:
        store = PostgresEpisodeStore(database)
        of_group = None if group is None else await store.find_group(group)
        found = await store.episodes(policy=policy, group=of_group, limit=limit + 1)
        page = found[:limit]
        return EpisodePage(episodes=page, next=page[-1].id if len(found) > limit else None)

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


@episode_app.command("show")
def show_episode(
    episode: Annotated[str, typer.Argument(help="An id or its beginning, as `episode list` shows it, or last.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show one episode; `clawloop why` explains each of its turns."""
    from db.episodes.groups import PostgresEpisodeStore

    async def read(database: Database) -> EpisodeView:
        store = PostgresEpisodeStore(database)
        found = await store.episode(await store.find_episode(episode))
        assert found is not None  # nothing deletes episodes
        return found

    found = with_database(data, read)
    if as_json:
        show_json(found)
    else:
        workflow = links_of(data).named(f"rollout-group/{found.group}")
        show_facts(_facts(found) | {"workflow": workflow})


def _apply(
    data: Path | None, change: Callable[[RolloutOperations], Coroutine[Any, Any, Applied[RolloutsView]]]
) -> RolloutsView:
    applied = with_operations(data, lambda operations: change(operations.rollouts))
    if applied.signal_error is not None:
        typer.echo(f"stored; its workflow was not notified: {applied.signal_error}", err=True)
    return applied.result


def _show(view: RolloutsView, as_json: bool) -> None:
    if as_json:
        show_json(view)
        return
    facts = {"policy": view.policy, "state": str(view.state), "reason": view.reason}
    if view.plan is not None:
        facts["environment"] = view.plan.environment
        facts["group size"] = str(view.plan.size)
        facts["groups"] = f"{view.in_flight} of {view.plan.groups} in flight"
    facts["finished"] = f"{view.settled} settled, {view.dropped} dropped"
    facts["reward"] = "" if view.recent_reward is None else f"{view.recent_reward:.3f} in the last 20 groups"
    show_facts(facts)


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
