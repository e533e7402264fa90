"""`clawloop evaluate`: the yardstick of OpenClaw-RL's second paper. Heavy imports happen inside the verb."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawloop.app.cli.gateway_request import Url, gateway_address, kept_key, require_gateway
from clawloop.app.cli.terminal import Data, show_table
from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from clawloop.app.evaluation.lines import LineFile
    from clawloop.app.evaluation.run import Plan


def evaluate_command(
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="File of raw JSON lines; an unfinished evaluation goes on from it.")
    ],
    url: Url = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key with the scope admin; by default that of `up` on the data folder.", envvar="CLAWLOOP_ADMIN_KEY"
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Its base model is evaluated, and its recipe without --recipe.")
    ] = "default",
    recipe: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Recipe to learn by, by its name; repeatable."),
    ] = None,
    notes: Annotated[bool, typer.Option(help="The baseline that keeps corrections in the prompt.")] = True,
    lessons: Annotated[
        bool, typer.Option("--lessons", help="The first recipe once more, with lessons that are practised and retired.")
    ] = False,
    user: Annotated[list[str] | None, typer.Option(help="student, assistant or teacher; all by default.")] = None,
    joint: Annotated[bool, typer.Option("--joint", help="One policy for all users instead of one each.")] = False,
    homework: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Homework in GSM8K's form; our own by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=30, help="Independent runs of each.")] = 5,
    limit: Annotated[int, typer.Option(min=3, help="Most sessions of a user.")] = 72,
    replies: Annotated[int, typer.Option(min=1, help="Most replies of a session.")] = 8,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a reply; set more for models that think.")
    ] = 1024,
    user_url: Annotated[
        str | None, typer.Option(help="URL of a model that plays the users; OpenAI-compatible. Scripted by default.")
    ] = None,
    user_model: Annotated[str | None, typer.Option(help="Name of the model that plays the users.")] = None,
    user_key: Annotated[
        str | None, typer.Option(help="Key of the model that plays the users.", envvar="CLAWLOOP_USER_KEY")
    ] = None,
    wait_minutes: Annotated[float, typer.Option(min=0, help="Longest wait until a session is learned.")] = 60.0,
    practice_minutes: Annotated[
        float, typer.Option(min=0, help="Pause before a session with lessons whose user is content, for practice.")
    ] = 2.0,
    data: Data = None,
    chart: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG to draw: tokens of the prompt, session by session.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the sessions until a policy does what its users want, beside frozen weights and notes in the prompt."""
    from clawloop.app.evaluation.homework import own_homework, read_homework
    from clawloop.app.evaluation.lines import LineFile
    from clawloop.app.evaluation.run import Plan, is_complete

    if (user_url is None) != (user_model is None):
        raise SetupError("--user-url and --user-model go together: give both, or neither for scripted users")
    plan = Plan(
        like=policy,
        recipes={"learning": None} if not recipe else _recipes(recipe),
        notes=notes,
        users=_users(user),
        homework=own_homework() if homework is None else read_homework(homework),
        joint=joint,
        seeds=seeds,
        limit=limit,
        replies=replies,
        answer_tokens=answer_tokens,
        user_model=user_model,
        lessons=lessons,
    )
    for option, path in (("--out", out), ("--chart", chart)):
        if path is not None and not path.parent.is_dir():
            raise SetupError(f"{option} {path}: there is no folder {path.parent}")
    lines: LineFile | None = LineFile(out, plan.settings()) if out.exists() else None
    problem: str | None = None
    if lines is None or not is_complete(plan, lines):
        address = gateway_address(url, data)
        admin_key = key or kept_key(data, "admin")
        require_gateway(address, admin_key)
        lines = lines or LineFile(out, plan.settings())
        try:
            asyncio.run(_run(plan, lines, address, admin_key, user_url, user_key, wait_minutes, practice_minutes))
        except SetupError as error:
            problem = str(error)
    _show(plan, lines, as_json=as_json)
    if chart is not None:
        from clawloop.app.evaluation.chart import draw_tokens
        from clawloop.app.evaluation.run import finished_runs

        draw_tokens(chart, finished_runs(plan, lines))
    if problem is not None:
        raise SetupError(f"the evaluation is not finished, the same command goes on with it: {problem}")


async def _run(
    plan: Plan,
    lines: LineFile,
    address: str,
    key: str,
    user_url: str | None,
    user_key: str | None,
    wait_minutes: float,
    practice_minutes: float,
) -> None:
    from clawloop.app.demo.admin_client import AdminClient
    from clawloop.app.evaluation.clients import ModelClient
    from clawloop.app.evaluation.run import Evaluation

    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(AdminClient(address, key))
        player = None
        if user_url is not None and plan.user_model is not None:
            client = ModelClient("the user", user_url, plan.user_model, user_key, answer_tokens=plan.answer_tokens)
            player = await stack.enter_async_context(client)

        def report(line: str) -> None:
            typer.echo(line, err=True)

        await Evaluation(plan, lines, address, admin, player, wait_minutes, report, practice_minutes).run()


def _users(names: list[str] | None) -> list[Any]:
    from clawloop.app.evaluation.users import User

    try:
        return list(dict.fromkeys(User(name) for name in names or User))
    except ValueError as error:
        raise typer.BadParameter(f"{error}: student, assistant or teacher", param_hint="--user") from error


def _recipes(files: list[Path]) -> dict[str, dict[str, Any] | None]:
    from clawloop.app.evaluation.run import FROZEN, LESSONS, NOTES
    from clawloop.core.recipes.recipe import load_recipe

    found: dict[str, dict[str, Any] | None] = {}
    for file in files:
        recipe = load_recipe(file)
        if recipe.name in {FROZEN, NOTES, LESSONS, *found}:
            raise SetupError(f"{file}: another arm is called {recipe.name!r}: give the recipe another `name`")
        found[recipe.name] = recipe.model_dump(mode="json")
    return found


def _show(plan: Plan, lines: LineFile, *, as_json: bool) -> None:
    from clawloop.app.evaluation.figures import INTERVAL, MOST_BASE_RATE, shown_table
    from clawloop.app.evaluation.run import rows

    found = rows(plan, lines)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in found], indent=2))
        return
    show_table(shown_table(found))
    served = "one policy for all users" if plan.joint else "one policy for each user"
    typer.echo(
        f"sessions until three first replies in a row meet the user's rule, at most {plan.limit}; {served}; "
        f"{INTERVAL}; users whose base rate is above {MOST_BASE_RATE:.0%} do not count"
    )
