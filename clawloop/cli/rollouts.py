"""`clawloop rollouts` and `clawloop episode`: agents that practise in sandboxes.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from clawloop.cli.operations import with_operations
from clawloop.cli.terminal import AsJson, Data, show_facts, show_rows, when, with_database
from clawloop.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from clawloop.contracts.episodes import EpisodeView, RolloutsView
    from clawloop.operations.applied import Applied
    from clawloop.operations.rollouts import RolloutOperations

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
    group: Annotated[UUID | None, typer.Option(help="Only of this rollout group.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show episodes, newest first: how each ended, its reward, and what was trained."""
    from clawloop.ids import RolloutGroupId
    from db.episodes.groups import PostgresEpisodeStore

    of_group = None if group is None else RolloutGroupId(group)
    episodes = with_database(
        data,
        lambda database: PostgresEpisodeStore(database).episodes(policy=policy, group=of_group, limit=limit),
    )
    show_rows([_facts(episode) for episode in episodes], as_json)


@episode_app.command("show")
def show_episode(
    episode: Annotated[UUID, typer.Argument(help="As `episode list` shows it.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show one episode; `clawloop why` explains each of its turns."""
    from clawloop.ids import EpisodeId
    from db.episodes.groups import PostgresEpisodeStore

    found = with_database(data, lambda database: PostgresEpisodeStore(database).episode(EpisodeId(episode)))
    if found is None:
        raise NotFound(f"there is no episode {episode}", code="episode_not_found", field="episode")
    more = {
        "group": str(found.group),
        "environment": found.environment,
        "policy": found.policy,
        "ended": when(found.ended_at),
        "artifact": found.artifact_sha256 or "",
    }
    show_facts(_facts(found) | more, as_json)


def _apply(
    data: Path | None, change: Callable[[RolloutOperations], Coroutine[Any, Any, Applied[RolloutsView]]]
) -> RolloutsView:
    applied = with_operations(data, lambda operations: change(operations.rollouts))
    if applied.signal_error is not None:
        typer.echo(f"stored; its workflow was not notified: {applied.signal_error}", err=True)
    return applied.result


def _show(view: RolloutsView, as_json: bool) -> None:
    facts = {"policy": view.policy, "state": str(view.state), "reason": view.reason}
    if view.plan is not None:
        facts["environment"] = view.plan.environment
        facts["group size"] = str(view.plan.size)
        facts["groups"] = f"{view.in_flight} of {view.plan.groups} in flight"
    facts["finished"] = f"{view.settled} settled, {view.dropped} dropped"
    facts["reward"] = "" if view.recent_reward is None else f"{view.recent_reward:.3f} in the last 20 groups"
    show_facts(facts, as_json)


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
    }
