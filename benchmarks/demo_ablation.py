"""Compares settings of a recipe on the demo's learning loop, user by user.

Each variant (`benchmarks.ablation_table`) changes one setting of the demo's recipe and meets the same users. A user's
line is appended to --out as soon as it has ended, and users that the file has are not run again: so a run that was
stopped goes on, and several may share the work by --seeds or --variants.
Run: python -m benchmarks.demo_ablation --out docs/demo/ablation.jsonl, then with --table as well, or with
--docs docs/learning.md, which writes the table into the document.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.ablation_table import VARIANTS, by_variant, table, write_section
from benchmarks.demo_learning import append_line, changed, line_of, read_lines, run_user
from clawloop.demo.location import model_path
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.errors import SetupError


def run_variants(options: argparse.Namespace) -> None:
    """Run the users that the file does not have yet.

    Raises:
        SetupError: the file has lines that those would not be comparable with.
    """
    recipes = {variant: changed(demo_recipe(Method.COMBINED), VARIANTS[variant]) for variant in options.variants}
    lines = read_lines(options.out)
    asked = [
        {"variant": variant, "recipe": recipe.hash, "interactions": options.interactions, "run": {"seed": seed}}
        for variant, recipe in recipes.items()
        for seed in options.seeds
    ]
    by_variant([*lines, *asked])
    done = {(line["variant"], line["run"]["seed"]) for line in lines}
    # All variants of a user first, so that a table of few users has all of them.
    left = [(seed, variant) for seed in options.seeds for variant in recipes if (variant, seed) not in done]
    for number, (seed, variant) in enumerate(left, start=1):
        options.set = list(VARIANTS[variant])
        user = run_user(options, recipes[variant], seed, Method.COMBINED)
        line = {"variant": variant, "interactions": options.interactions, **user}
        append_line(options.out, line)
        print(f"{number} of {len(left)}: {variant}: {line_of(line)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 21)), help="of tuning: below 100")
    parser.add_argument("--interactions", type=int, default=100)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each user and variant")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="run nothing, write the table into this document")
    # What `run_user` also takes.
    parser.set_defaults(flip=[], measure_every=1, no_gate=False, verbose=False)
    options = parser.parse_args()
    try:
        if options.docs is not None:
            write_section(options.docs, read_lines(options.out), demo_recipe(Method.COMBINED).hash)
        elif options.table:
            print(table(read_lines(options.out)))
        else:
            run_variants(options)
    except SetupError as error:
        sys.exit(f"demo_ablation: {error}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
