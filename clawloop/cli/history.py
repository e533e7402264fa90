"""`clawloop judge history`: compares in small calls until all turns are compared, and prints the agreement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from clawloop.cli.operations import with_history
from clawloop.contracts.answers import Rejudged
from clawloop.judging.agreement import Agreement
from clawloop.judging.voting import signed
from clawloop.operations.history import History, HistoryOperations
from clawloop.recipes.recipe import Recipe, load_recipe

# Each call is a little work, and progress is shown after it.
_TURNS_A_CALL = 20


def compare(data: Path | None, path: Path | None, policy: str, turns: int | None, *, apply: bool) -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    recipe = None if path is None else load_recipe(path)

    async def work(history: HistoryOperations) -> tuple[History, list[Rejudged]]:
        found = await _all(history, policy, recipe, turns)
        return found, await history.apply(policy, recipe) if apply and found.stopped is None else []

    found, applied = with_history(data, work)
    again = [{"turn_id": str(one.turn_id), "refused": one.refused} for one in applied]
    return {**asdict(found), "applied": again}


async def _all(history: HistoryOperations, policy: str, recipe: Recipe | None, turns: int | None) -> History:
    judged = 0
    while True:
        wanted = _TURNS_A_CALL if turns is None else min(_TURNS_A_CALL, turns - judged)
        found = await history.compare(policy, recipe, wanted)
        judged += found.judged
        typer.echo(f"{found.all.turns} turns compared, {found.left} left", err=True)
        if found.stopped is not None or not found.left or not found.judged or (turns is not None and judged >= turns):
            return found


def shown(found: dict[str, Any]) -> str:
    """The agreement as a table for people."""
    overall: dict[str, Any] = found["all"]
    lines = [f"judge: {found['judge']}", f"all turns: {_summary(overall)}"]
    lines += [f"version {version}: {_summary(one)}" for version, one in found["versions"].items()]
    if overall["cells"]:
        lines += ["", "verdict  new verdict  turns"]
    for cell in overall["cells"]:
        after = "none" if cell["after"] is None else signed(cell["after"])
        lines.append(f"{signed(cell['before']):>7}  {after:>11}  {cell['turns']:>5}")
    for turn in found["applied"]:
        said = "is judged again" if turn["refused"] is None else f"stays: {turn['refused']}"
        lines.append(f"{turn['turn_id']} {said}")
    return "\n".join(lines)


def _summary(one: dict[str, Any]) -> str:
    figures = Agreement(**one)
    if figures.share is None:
        return f"{figures.turns} turns, no new verdict"
    voted = figures.turns - figures.missing
    kappa = "kappa not defined" if figures.kappa is None else f"kappa {figures.kappa:.2f}"
    missing = f", {figures.missing} without a new verdict" if figures.missing else ""
    return f"{figures.agreed} of {voted} agree ({figures.share:.0%}), {kappa}{missing}"
