"""`clawloop evaluate student|teacher`: the original's evaluation. Heavy imports happen inside the verb."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from clawloop.app.evaluation.run import Evaluation

_POLL_SECONDS = 2.0


def evaluate_command(
    setting: Annotated[str, typer.Argument(metavar="SETTING", help="student or teacher.")],
    key: Annotated[str, typer.Option(help="Key with which to chat.", envvar="CLAWLOOP_KEY")],
    persona_url: Annotated[str, typer.Option(help="URL of the model that plays the user; OpenAI-compatible.")],
    persona_model: Annotated[str, typer.Option(help="Name of the model that plays the user.")],
    persona_key: Annotated[
        str | None,
        typer.Option(help="Key of the model that plays the user; none by default.", envvar="CLAWLOOP_PERSONA_KEY"),
    ] = None,
    grader_url: Annotated[str | None, typer.Option(help="URL of the grader; the persona's by default.")] = None,
    grader_model: Annotated[
        str | None, typer.Option(help="Name of the grader's model; the persona's by default.")
    ] = None,
    grader_key: Annotated[str | None, typer.Option(help="The grader's key.", envvar="CLAWLOOP_GRADER_KEY")] = None,
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:30000",
    model: Annotated[str, typer.Option(help="The model name to chat with.")] = "policy",
    admin_key: Annotated[
        str | None,
        typer.Option(help="Admin key: waits until all is learned before it grades again.", envvar="CLAWLOOP_ADMIN_KEY"),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="The key's policy; with --admin-key its learning is waited for.")
    ] = "default",
    tasks: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Tasks in GSM8K's form; our own by default.")
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=0, help="Sessions; 36 for student, 24 for teacher.")] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Tasks that are graded and never chatted about.")] = 24,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer; set more for models that think.")
    ] = 1024,
    wait_minutes: Annotated[float, typer.Option(min=0, help="Longest wait until all is learned, in minutes.")] = 60.0,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the report, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Grade a policy's style, let a persona chat with it, and grade it again: the original's two settings."""
    from clawloop.app.evaluation.clients import ModelClient
    from clawloop.app.evaluation.run import Models, evaluate, split
    from clawloop.app.evaluation.settings import SETTINGS, SettingName
    from clawloop.app.evaluation.tasks import own_tasks, read_tasks

    if setting not in [name.value for name in SettingName]:
        raise typer.BadParameter(f"{setting!r}: student or teacher", param_hint="SETTING")
    if out is not None and not out.parent.is_dir():
        raise SetupError(f"--out {out}: there is no folder {out.parent}")
    chosen = SETTINGS[SettingName(setting)]
    known = own_tasks() if tasks is None else read_tasks(tasks)
    chats, graded = split(known, chosen.sessions if sessions is None else sessions, held_out)

    async def run() -> Evaluation:
        await check_policy(url, admin_key, policy)
        grades_at = grader_url or persona_url
        client = partial(ModelClient, answer_tokens=answer_tokens)
        async with (
            client("the policy", url, model, key) as learner,
            client("the persona", persona_url, persona_model, persona_key) as persona,
            client("the grader", grades_at, grader_model or persona_model, grader_key or persona_key) as grader,
        ):
            return await evaluate(
                chosen,
                Models(learner, persona, grader),
                chats,
                graded,
                lambda: learned(url, admin_key, policy, wait_minutes),
                lambda line: typer.echo(line, err=True),
            )

    found = asyncio.run(run())
    report = json.dumps(found.as_json(), indent=2)
    typer.echo(report if as_json else _shown(found))
    if out is not None:
        try:
            out.write_text(report + "\n", encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{out} cannot be written: {error}") from error
    if found.problem is not None:
        raise SetupError(f"the evaluation is incomplete: {found.problem}")


async def check_policy(url: str, admin_key: str | None, policy: str) -> None:
    """Ask for the policy's training once, so that a mistake is not found after hours of sessions.

    Raises:
        SetupError: the key or the policy is wrong, or the gateway does not answer.
    """
    if admin_key is None:
        return
    from clawloop.app.demo.admin_client import AdminClient

    async with AdminClient(url, admin_key) as admin:
        await admin.training_status(policy)


async def learned(url: str, admin_key: str | None, policy: str, wait_minutes: float) -> None:
    """Return once every turn is judged, every full batch is trained and the newest version answers, or time is up.

    Without an admin key it returns at once, and says so; likewise once all is judged while training is paused.
    """
    if admin_key is None:
        typer.echo("no --admin-key: graded again at once, with what is learned by now", err=True)
        return
    from clawloop.app.demo.admin_client import AdminClient
    from clawloop.core.contracts.training import TrainingState

    async with AdminClient(url, admin_key) as admin:
        status = None
        try:
            async with asyncio.timeout(60 * wait_minutes):
                while True:
                    status = await admin.training_status(policy)
                    if status.is_done:
                        return
                    if status.state is TrainingState.PAUSED and not status.judging:
                        typer.echo(f"training is {status.reason}: graded again with what is learned by now", err=True)
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            why = "" if status is None else f": {status.reason}"
            typer.echo(f"not all is learned after {wait_minutes:g} minutes{why}", err=True)


def _shown(found: Evaluation) -> str:
    from clawloop.app.evaluation.run import shown

    words = {"by_model": "style, by the grader", "by_rules": "style, by rules", "right": "right solutions"}
    lines = [
        f"{found.setting}: {found.sessions} sessions, {found.completed} completed, {found.turns} answers",
        "95 % intervals, over tasks that no session was about",
    ]
    for name, label in words.items():
        before = found.before[name]
        if not found.after:
            lines += [f"{label}: {shown(before)} before"] if before.count else []
            continue
        after, change = found.after[name], found.changes[name]
        if before.count and change.mean is not None and change.low is not None and change.high is not None:
            by = f"{change.mean:+.2f} ({change.low:+.2f} to {change.high:+.2f})"
            lines.append(f"{label}: {shown(before)} before, {shown(after)} after, changed by {by}")
    return "\n".join(lines)
