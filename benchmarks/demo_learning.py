"""Measures how the demo's model learns, in one process: the figures in docs/demo.md.

See `benchmarks.demo_loop` for what is real in it. Each user is a line of `--out` as soon as it has ended, and users
that the file has are not run again, so a run that was stopped goes on.
Run: python -m benchmarks.demo_learning --methods opd --seeds 1 2 --flip code --out users.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo_loop import DemoLoop, learn
from clawloop.demo.location import model_path
from clawloop.demo.plan import Plan, PlannedRun
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.demo.report import RunTotals, report_run
from clawloop.demo.world import Axis
from clawloop.recipes.recipe import Recipe, read_recipe


def run_user(options: argparse.Namespace, recipe: Recipe, seed: int, method: Method) -> dict[str, Any]:
    """Run one user and return its line."""
    began = time.perf_counter()
    run = PlannedRun(seed, method)
    plan = Plan((run,), options.interactions, True, tuple(options.flip), options.measure_every)
    loop = DemoLoop(options.model, recipe, run, gated=not options.no_gate)
    evaluations = []
    for row in learn(loop, options.interactions, options.flip, options.measure_every):
        evaluations.append(row)
        if options.verbose:
            right = loop.steps[-1].right if loop.steps else None
            print(row.interactions, row.version, f"match {row.match:.2f} exact {row.exact:.2f} probes {right}")
    totals = RunTotals(
        interactions=loop.chats.interactions,
        failed=0,
        versions=loop.step,
        steps=loop.step,
        seconds=time.perf_counter() - began,
        flipped_at=options.interactions // 2 if options.flip else None,
        stopped=loop.stopped,
        rejected=sum(step.rejected is not None for step in loop.steps),
        probed=sum(step.right is not None for step in loop.steps),
    )
    report = asdict(report_run(plan, run, evaluations, totals, 0.0))
    return {
        "recipe": recipe.hash,
        "settings": options.set,
        "run": report,
        "gate": [asdict(step) for step in loop.steps],
    }


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with settings such as `train.optimiser.lr=0.001` on top."""
    content = recipe.model_dump()
    for setting in settings:
        path, _, value = setting.partition("=")
        *tables, key = path.split(".")
        table = content
        for name in tables:
            table = table[name]
        is_word = value.isalpha() and value not in ("true", "false")
        table[key] = value if is_word else json.loads(value)
    return Recipe.model_validate(content)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The users that a file has; a last line that was being written when its run was killed is none."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def append_line(path: Path, one: Mapping[str, Any]) -> None:
    """Append a user's line, in one write: several runs may share a file."""
    begun = b""
    if path.exists():
        begun = path.read_bytes().rpartition(b"\n")[2]  # of a line whose run was killed
    with path.open("ab", buffering=0) as out:
        if begun:
            out.truncate(path.stat().st_size - len(begun))
        out.write(json.dumps(one).encode() + b"\n")


def line_of(one: Mapping[str, Any]) -> str:
    """What is printed of a user's line."""
    run = one["run"]
    again = "" if run["flipped_at"] is None else f", again after {run['relearned_after']}"
    parts = [
        f"seed {run['seed']} {run['method']}: 90 % after {run['interactions_to_90']}{again}",
        f"match {run['match_after']:.0%}, held {run['match_held']}, kept {run['match_kept']}",
        f"exact at least {run['exact_least']:.0%}",
        f"{run['versions']} versions, {run['rejected']} rejected, {run['seconds']:.0f} s, stopped: {run['stopped']}",
    ]
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--methods", type=Method, nargs="+", default=[Method.COMBINED], help="binary, opd, combined")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--interactions", type=int, default=96)
    parser.add_argument("--recipe", type=Path, help="instead of the demo's, for each method")
    parser.add_argument("--set", nargs="*", default=[], help="keys with other values, e.g. train.loss.kl=0.1")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each user, and skip those it has")
    parser.add_argument("--flip", type=Axis, nargs="+", default=[], help="code, length, tone")
    parser.add_argument("--measure-every", type=int, default=1, help="after 128 interactions each n-th version only")
    parser.add_argument("--no-gate", action="store_true", help="let each version answer")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    lines = read_lines(options.out) if options.out is not None else []
    done = {(one["recipe"], one["run"]["seed"], one["run"]["interactions"]) for one in lines}
    for seed in options.seeds:
        for method in options.methods:
            recipe = read_recipe(options.recipe.read_text()) if options.recipe else demo_recipe(method)
            recipe = changed(recipe, options.set)
            if (recipe.hash, seed, options.interactions) in done:
                continue
            one = run_user(options, recipe, seed, method)
            print(line_of(one), flush=True)
            if options.out is not None:
                append_line(options.out, one)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
