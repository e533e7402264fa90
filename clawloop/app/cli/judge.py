"""`clawloop judge`: has turns judged again, and shows what votes are worth. Heavy imports happen inside the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.operations import with_operations, with_policy_operations
from clawloop.app.cli.session import SESSION_HELP, TURN_HELP
from clawloop.app.cli.terminal import AsJson, Data, Policy, fail, show_json, show_table, with_policy
from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clawloop.app.processes.operations import Operations
    from clawloop.core.contracts.answers import Rejudged

judge_app = typer.Typer(no_args_is_help=True, help="Judging.")


@judge_app.callback()
def judge() -> None:
    """Judging."""


@judge_app.command("again")
def rejudge(
    turn: Annotated[str | None, typer.Argument(metavar="[ID]", help=TURN_HELP)] = None,
    session: Annotated[str | None, typer.Option(help=f"All turns of this session that can be. {SESSION_HELP}")] = None,
    unjudged: Annotated[bool, typer.Option("--unjudged", help="All turns without a valid vote.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Have turns judged again: with the current recipe, without the earlier votes."""
    if [turn is not None, session is not None, unjudged].count(True) != 1:
        raise typer.BadParameter("give one of ID, --session and --unjudged", param_hint="ID")
    results = with_operations(data, lambda operations: _rejudge(operations, turn, session))
    if as_json:
        from clawloop.core.contracts.answers import RejudgeList

        show_json(results[0] if turn is not None else RejudgeList(turns=results))
        return
    for result in results:
        typer.echo(f"{result.turn_id} {_message(result)}")
    if not results:
        typer.echo("No turn of that kind.")


@judge_app.command("history")
def compare_history(
    recipe: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Recipe that judges; the policy's own by default."),
    ] = None,
    policy: Policy = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Then have the turns with differing verdicts judged again.")
    ] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="Judge at most this many further turns.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --apply: do not ask.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored turns by another judge or recipe and compare the verdicts; changes nothing without --apply."""
    from clawloop.app.cli.history import applied_lines, apply_verdicts, compare, shown
    from clawloop.operations.history import judged_by_workers

    found = compare(data, recipe, policy, turns)
    if not as_json:
        typer.echo(shown(found))
    applied: list[Rejudged] = []
    if apply and found.stopped is None:
        typer.echo(judged_by_workers(found.judge), err=True)
        if not yes:
            typer.confirm("Have the turns judged again on which the verdicts differ?", abort=True, err=True)
        applied = apply_verdicts(data, recipe, policy)
        if not as_json:
            typer.echo("\n".join(applied_lines(applied)))
    if as_json:
        show_json(found.model_copy(update={"applied": applied}))
    if found.stopped is not None:
        fail(f"{found.stopped}; the same command goes on with the {found.left} turns that are left")


@judge_app.command("try")
def try_judge(
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, help="TOML with phrases of your own; ours by default, and then it counts."
        ),
    ] = None,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Measure the judge on 100 labelled phrases, and say in which form it judges best."""
    from dataclasses import asdict

    from clawloop.core.judging.phrases import parse_phrases

    own = None if file is None else parse_phrases(file.read_text(encoding="utf-8"), str(file))
    trial, form = with_policy_operations(
        data, policy, lambda operations, name: operations.try_judge(name, own, lambda line: typer.echo(line, err=True))
    )
    if as_json:
        typer.echo(json.dumps(asdict(trial)))
        return
    rows = [
        {"form": name, "right": f"{found.accuracy:.2f}", "kappa": f"{found.kappa:.2f}"}
        | {kind: f"{right}/{phrases}" for kind, (phrases, right) in found.by_kind.items()}
        for name, found in trial.by_form.items()
    ]
    show_table(rows)
    biases = "" if trial.biases is None else f", biases {trial.biases[1]:+.2f} for 1 and {trial.biases[-1]:+.2f} for -1"
    typer.echo(f"form: {trial.form}{biases} (model {trial.judge}, {trial.digest[:12]})")
    found, phrases = trial.reported, "phrases that decided nothing" if own is None else "phrases, which chose the form"
    typer.echo(f"{found.accuracy:.0%} right, kappa {found.kappa:.2f}, on {found.phrases} {phrases}")
    if form is not None:
        typer.echo(f"its votes are learned from whatever this says: the settings prescribe the form {form}")
    elif own is None:
        typer.echo(trial.votes_off or "its votes are learned from; judge workers know within a minute")


@judge_app.command("precision")
def show_precision(
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show the agreement of votes on episodes' turns with rewards, by the number of votes in a verdict."""
    from clawloop.operations.history import judge_precision
    from db.judging.rejudging import PostgresVoteReader

    found = with_policy(
        data, policy, lambda database, name: judge_precision(PostgresVoteReader(database).voted_turns, name)
    )
    if as_json:
        show_json(found)
        return
    rows = [
        {
            "votes": str(row.m),
            "turns": str(row.turns),
            "succeeded": f"{row.base:.2f}",
            "praised": str(row.good),
            "rightly": _share(row.good_precision),
            "blamed": str(row.bad),
            "rightly blamed": _share(row.bad_precision),
        }
        for row in found.by_votes
    ]
    show_table(rows, none="no turn of an episode with a reward has votes")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _message(result: Rejudged) -> str:
    if result.refused is not None:
        return f"stays: {result.refused}"
    return f"is judged again, revision {result.revision}"


async def _rejudge(operations: Operations, turn: str | None, session: str | None) -> Sequence[Rejudged]:
    """
    Raises:
        NotFound, AmbiguousId: there is no such turn or session, or there are several.
        SetupError: the one turn cannot be judged again.
        SignalFailed, StoreUnavailable
    """
    references, sessions = operations.reading.references, operations.sessions
    if turn is not None:
        result = await sessions.rejudge_turn(await references.turn(turn))
        if result is None:
            raise SetupError(f"turn {turn} belongs to an episode: only its rollout group decides its reward")
        if result.refused is not None:
            raise SetupError(f"turn {result.turn_id} cannot be judged again: {result.refused}")
        return [result]
    if session is not None:
        return await sessions.rejudge_session(await references.session(session))
    return await sessions.rejudge_unjudged()
