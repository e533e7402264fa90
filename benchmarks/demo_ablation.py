"""Compares settings of a recipe on the demo's learning loop, user by user.

Each variant changes one setting of the demo's recipe and meets the same users; differences are paired by user, with
Student's 95 % intervals of their mean. Lines are appended for each user, so a run that was stopped goes on.
Run: python -m benchmarks.demo_ablation --seeds 1 2 3 --out ablation.jsonl, and with --table alone for the table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.demo_learning import changed, line_of, read_lines, run_user
from clawloop.demo.location import model_path
from clawloop.demo.recipes import Method, demo_recipe

_DISTILLED = ["train.loss.distillation=0.2", "train.distillation.top_k=8", "train.distillation.top_k_of=teacher"]
VARIANTS: Mapping[str, Sequence[str]] = {
    "as it is": [],
    "opd_clip 1": ["train.advantage.opd_clip=1"],
    "opd_clip 4": ["train.advantage.opd_clip=4"],
    "w_opd 0, no hints": ["train.advantage.teacher_weight=0", "signal.hints=false"],
    "w_opd 0.5": ["train.advantage.teacher_weight=0.5"],
    "w_opd 2": ["train.advantage.teacher_weight=2"],
    "kl 0": ["train.loss.kl=0"],
    "kl 0.02": ["train.loss.kl=0.02"],
    "beta1 0.9": ["train.optimiser.beta1=0.9"],
    "grad_clip 1": ["train.optimiser.grad_clip=1"],
    "baseline mean": ["signal.baseline=mean"],
    "spare_unlikely 0": ["train.advantage.spare_unlikely=0"],
    "spare_unlikely 0.5": ["train.advantage.spare_unlikely=0.5"],
    "reverse divergence 0.2": _DISTILLED,
    "forward divergence 0.2": [*_DISTILLED, "train.distillation.divergence=forward"],
}
# Of Student's t, two-sided 95 %, for so many degrees of freedom; 1.96 beyond.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09}


def figures(run: Mapping[str, Any]) -> dict[str, float]:
    """What a user's run is compared by: mean match of all versions, that of the last three, least right content."""
    matches = [row["match"] for row in run["evaluations"][1:]]
    return {
        "match, mean": fmean(matches) if matches else run["match_before"],
        "match, last three": fmean(matches[-3:]) if matches else run["match_before"],
        "least right content": run["exact_least"],
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval; NaN for fewer than two values."""
    if len(values) < 2:
        return fmean(values) if values else math.nan, math.nan
    freedom = len(values) - 1
    factor = _T[max(known for known in _T if known <= freedom)] if freedom <= 19 else 1.96
    return fmean(values), factor * stdev(values) / math.sqrt(len(values))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown: plain figures of the first row, differences to it in the others."""
    by_variant: dict[str, dict[int, dict[str, float]]] = {}
    for one in lines:
        by_variant.setdefault(one["variant"], {})[one["run"]["seed"]] = figures(one["run"])
    first, *_ = VARIANTS
    base = by_variant.get(first, {})
    names = list(next(iter(base.values()), {}))
    rows = [["variant", "users", *names], ["---"] * (len(names) + 2)]
    for variant in (name for name in VARIANTS if name in by_variant):
        of_users = by_variant[variant]
        shared = sorted(of_users if variant == first else of_users.keys() & base.keys())
        cells = []
        for name in names:
            values = [of_users[seed][name] - (0 if variant == first else base[seed][name]) for seed in shared]
            mean, half = interval(values)
            cells.append(f"{mean:.1%} ± {half:.1%}" if variant == first else f"{mean:+.1%} ± {half:.1%}")
        rows.append([variant, str(len(shared)), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 21)))
    parser.add_argument("--interactions", type=int, default=100)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each user and variant")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    # What `run_user` also takes.
    parser.set_defaults(flip=[], measure_every=1, no_gate=False, verbose=False)
    options = parser.parse_args()
    lines = read_lines(options.out)
    if options.table:
        print(table(lines))
        return
    done = {(one["variant"], one["recipe"], one["run"]["seed"]) for one in lines}
    for seed in options.seeds:  # all variants of a user first, so that a table of few users has all of them
        for variant in options.variants:
            recipe = changed(demo_recipe(Method.COMBINED), VARIANTS[variant])
            if (variant, recipe.hash, seed) in done:
                continue
            options.set = list(VARIANTS[variant])
            one = {"variant": variant, **run_user(options, recipe, seed, Method.COMBINED)}
            print(variant, line_of(one), flush=True)
            with options.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
