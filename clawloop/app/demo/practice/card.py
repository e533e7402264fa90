"""Writes a toy's card: how it was made, its measured success and the digest of its weights."""

from __future__ import annotations

from pathlib import Path

from clawloop.app.demo.card import CARD, Cost, digest
from clawloop.app.demo.practice.toy import Toy
from clawloop.app.demo.pretrain import Plan


def write_card(toy: Toy, folder: Path, plan: Plan, cost: Cost, success: float, tasks: int) -> None:
    """
    Args:
        success: share of the first held-out tasks, `tasks` of them, that it solves.
    """
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != CARD)
    (folder / CARD).write_text(
        f"""\
# Clawloop's {toy.environment} model

A toy language model of the Qwen3 architecture for `make demo ARGS="--environment {toy.environment}"`: {plan.layers} \
layers of width {plan.hidden}, {size / 1e6:.1f} MB in all, weights stored in float16 and read as float32. It knows \
{toy.course.knows}, and it is of no use outside the demo.

It is of middling skill on purpose. The scripts it was trained on {toy.course.skill}. So a right episode is among what \
it samples, and rollouts show it which.

## How it was made

From random weights by `clawloop demo pretrain --environment {toy.environment}`: {plan.steps} steps of {plan.lessons} \
lessons, seed {plan.seed}, in {cost}. All text is made by `clawloop/app/demo/{toy.folder.parent.name}/toy.py`, from \
training tasks only. The environment's list of tools is one token of this model's vocabulary, so after a change to it \
the model has to be made anew.

## What was measured

Success on the first {tasks} held-out tasks, one attempt each at temperature 1, with what it calls for run in the same \
process or in one sandbox for all: {success:.2f}

Weights: SHA-256 `{digest(folder)}`
""",
        encoding="utf-8",
    )
