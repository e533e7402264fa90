"""Writes the tool-call model's card: how it was made, its measured success and the digest of its weights."""

from __future__ import annotations

from pathlib import Path

from clawloop.demo.card import CARD, Cost, digest
from clawloop.demo.pretrain import Plan
from clawloop.demo.tool_calls.lessons import GUESSED, WRONG_ANSWER, WRONG_OPERATOR


def write_card(folder: Path, plan: Plan, cost: Cost, success: float, tasks: int) -> None:
    """
    Args:
        success: share of the first held-out tasks, `tasks` of them, that it solves.
    """
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != CARD)
    (folder / CARD).write_text(
        f"""\
# Clawloop's tool-call model

A toy language model of the Qwen3 architecture for `make demo ARGS="--environment tool-call"`: {plan.layers} layers \
of width {plan.hidden}, {size / 1e6:.1f} MB in all, weights stored in float16 and read as float32. It knows questions \
such as "What is 37 times 58?", one tool and nothing else, and it is of no use outside the demo.

It is of middling skill on purpose. The scripts it was trained on guess instead of calling the tool in {GUESSED:.0%} \
of the conversations, calculate something else in {WRONG_OPERATOR:.0%} of the calls, and answer with another number \
than the tool's in {WRONG_ANSWER:.0%}. So a right episode is among what it samples, and rollouts show it which.

## How it was made

From random weights by `clawloop demo pretrain --environment tool-call`: {plan.steps} steps of {plan.lessons} lessons, \
seed {plan.seed}, in {cost}. All text is made by `clawloop/demo/tool_calls/lessons.py`, from training tasks only. \
The environment's list of tools is one token of this model's vocabulary, so after a change to it the model has to be \
made anew.

## What was measured

Success on the first {tasks} held-out tasks, one attempt each at temperature 1, with its sums calculated in the same \
process: {success:.2f}

Weights: SHA-256 `{digest(folder)}`
""",
        encoding="utf-8",
    )
