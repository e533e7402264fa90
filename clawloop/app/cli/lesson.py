"""`clawloop lesson`: sentences that a policy's prompts hold. Heavy imports happen inside a verb."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from clawloop.app.cli.terminal import AsJson, Data, Policy, age, show_json, show_table, with_policy

if TYPE_CHECKING:
    from pathlib import Path

    from clawloop.core.contracts.answers import LessonForgotten, LessonList, LessonView
    from clawloop.operations.lessons import LessonOperations

lesson_app = typer.Typer(no_args_is_help=True, help="Lessons: sentences that a policy's prompts hold.")

Lesson = Annotated[str, typer.Argument(metavar="ID", help="From `clawloop lesson list`, or its beginning.")]
Result = TypeVar("Result")


@lesson_app.callback()
def lesson() -> None:
    """Lessons: sentences that a policy's prompts hold."""


@lesson_app.command("list")
def list_lessons(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """List the policy's lessons, oldest first."""
    from clawloop.operations.lessons import warnings

    listed = _with_lessons(data, policy, lambda lessons, name: lessons.list(name))
    if as_json:
        show_json(listed)
        return
    show_table([_row(one) for one in listed.lessons])
    for warning in warnings(listed):
        typer.echo(warning)


@lesson_app.command("add")
def add_lesson(
    text: Annotated[str, typer.Argument(help="One sentence, 300 characters at most.")],
    instead_of: Annotated[str | None, typer.Option(metavar="ID", help="The lesson that it replaces.")] = None,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Add a lesson; new sessions get it."""
    from clawloop.operations.lessons import warnings

    async def add(lessons: LessonOperations, name: str) -> tuple[LessonView, LessonList]:
        return await lessons.add(name, text, instead_of), await lessons.list(name)

    added, listed = _with_lessons(data, policy, add)
    if as_json:
        show_json(added)
        return
    typer.echo(f"lesson {added.short_id} is {added.state.value}")
    for warning in warnings(listed):
        typer.echo(warning)


@lesson_app.command("off")
def turn_lesson_off(lesson: Lesson, policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Leave a lesson out of the prompts of new sessions."""
    _show(_with_lessons(data, policy, lambda lessons, name: lessons.turn_off(name, lesson)), as_json)


@lesson_app.command("on")
def turn_lesson_on(lesson: Lesson, policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Have new sessions get a lesson again."""
    _show(_with_lessons(data, policy, lambda lessons, name: lessons.turn_on(name, lesson)), as_json)


@lesson_app.command("forget")
def forget_lesson(lesson: Lesson, policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """Erase a lesson for good, with the tokens of all prompts that held it."""

    async def forget(lessons: LessonOperations, name: str) -> tuple[LessonForgotten, str]:
        done = await lessons.forget(name, lesson)
        return done, done.what_is_left(name)

    forgotten, left = _with_lessons(data, policy, forget)
    if as_json:
        show_json(forgotten)
    else:
        typer.echo(f"forgotten, with the prompts of {forgotten.turns} turns")
        if left:
            typer.echo(left)


def _with_lessons(
    data: Path | None, policy: str | None, work: Callable[[LessonOperations, str], Coroutine[Any, Any, Result]]
) -> Result:
    from clawloop.operations.lessons import LessonOperations
    from db.lessons.ledger import PostgresLessonStore

    return with_policy(data, policy, lambda database, name: work(LessonOperations(PostgresLessonStore(database)), name))


def _show(changed: LessonView, as_json: bool) -> None:
    if as_json:
        show_json(changed)
    else:
        typer.echo(f"lesson {changed.short_id} is {changed.state.value}")


def _row(lesson: LessonView) -> dict[str, str]:
    summary = None if lesson.yardstick is None else lesson.yardstick.summary or None
    return {
        "id": lesson.short_id,
        "age": age(lesson.created_at),
        "state": lesson.state.value,
        "in prompt": "yes" if lesson.in_prompt else "",
        "replies": str(lesson.turns),
        "practised": str(lesson.practised),
        "why": lesson.why if summary is None else f"{lesson.why}; {summary}",
        "lesson": lesson.text,
    }
