"""`clawloop judge history`: compares in small calls until all turns are compared, and prints the agreement."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clawloop.app.cli.operations import Result, with_policy_operations
from clawloop.core.contracts.answers import Rejudged
from clawloop.core.judging.agreement import Agreement
from clawloop.core.judging.voting import signed
from clawloop.core.recipes.recipe import Recipe, load_recipe
from clawloop.operations.history import ComparedHistory, HistoryOperations

if TYPE_CHECKING:
    from clawloop.app.processes.operations import Operations

# Each call is a little work, and progress is shown after it.
_TURNS_A_CALL = 20


def compare(data: Path | None, path: Path | None, policy: str | None, turns: int | None) -> ComparedHistory:
    """The comparison with a recipe's file, or with the policy's own recipe; nothing changes."""
    recipe = None if path is None else load_recipe(path)
    return with_policy_operations(
        data, policy, partial(_with_history, lambda history, name: _all(history, name, recipe, turns))
    )


def apply_verdicts(data: Path | None, path: Path | None, policy: str | None) -> list[Rejudged]:
    """Have the turns judged again on which the verdicts differ."""
    recipe = None if path is None else load_recipe(path)
    return with_policy_operations(
        data, policy, partial(_with_history, lambda history, name: history.apply(name, recipe))
    )


async def _with_history(
    work: Callable[[HistoryOperations, str], Coroutine[Any, Any, Result]], operations: Operations, policy: str
) -> Result:
    directory = await operations.directory()
    async with operations.history(lambda: directory) as history:
        return await work(history, policy)


async def _all(history: HistoryOperations, policy: str, recipe: Recipe | None, turns: int | None) -> ComparedHistory:
    judged = 0
    while True:
        wanted = _TURNS_A_CALL if turns is None else min(_TURNS_A_CALL, turns - judged)
        found = await history.compare(policy, recipe, wanted)
        judged += found.judged
        typer.echo(f"{found.all.turns} turns compared, {found.left} left", err=True)
        if found.stopped is not None or not found.left or not found.judged or (turns is not None and judged >= turns):
            return found


def shown(found: ComparedHistory) -> str:
    """The agreement as a table for people."""
    lines = [f"judge: {found.judge}", f"all turns: {_summary(found.all)}"]
    lines += [f"version {version}: {_summary(one)}" for version, one in found.versions.items()]
    if found.all.cells:
        lines += ["", "verdict  new verdict  turns"]
    for cell in found.all.cells:
        after = "none" if cell.after is None else signed(cell.after)
        lines.append(f"{signed(cell.before):>7}  {after:>11}  {cell.turns:>5}")
    return "\n".join(lines)


def applied_lines(applied: Sequence[Rejudged]) -> Iterator[str]:
    """A line for each turn that is judged again or stays, with the reason."""
    if not applied:
        yield "No turns to judge again: none differs, or those that differ were rated or judged again since."
    for turn in applied:
        told = "is judged again by the judge workers" if turn.refused is None else f"stays: {turn.refused}"
        yield f"{turn.turn_id} {told}"


def _summary(figures: Agreement) -> str:
    if figures.share is None:
        return f"{figures.turns} turns, no new verdict"
    voted = figures.turns - figures.missing
    kappa = "kappa not defined" if figures.kappa is None else f"kappa {figures.kappa:.2f}"
    missing = f", {figures.missing} without a new verdict" if figures.missing else ""
    return f"{figures.agreed} of {voted} agree ({figures.share:.0%}), {kappa}{missing}"
