"""Writes the demo model's card: how the model was made, its measured figures and the digest of its weights.

A test compares the digest with the weights, so the figures cannot describe other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawloop.app.demo.evaluate import AnswerFigures, JudgeFigures
from clawloop.app.demo.pretrain import Plan
from clawloop.app.demo.world import EVALUATION, STYLES, Axis, every_request

WEIGHTS = "model.safetensors"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Cost:
    """The time it took to make the model.

    Args:
        cpu_seconds: sum over all threads; less than seconds × threads on a busy machine.
    """

    seconds: float
    cpu_seconds: float
    threads: int

    def __str__(self) -> str:
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.seconds:.0f} s ({threads}, {self.cpu_seconds:.0f} s of processor time)"


def digest(folder: Path) -> str:
    """Return the SHA-256 of the weights."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def write_card(
    folder: Path,
    plan: Plan,
    cost: Cost,
    answers: Sequence[AnswerFigures],
    judged: Mapping[str, JudgeFigures],
) -> None:
    """Write the card beside the weights."""
    rows = "\n".join(
        f"| {name} | {f.phrases} | {f.vote:.3f} | "
        + " | ".join(f"{f.by_mood[mood]:.3f}" for mood in ("liked", "disliked", "wished", "unreadable"))
        + f" | {f.unreadable_as_bad:.3f} | {f.hint:.3f} | {f.no_hint:.3f} |"
        for name, f in judged.items()
    )
    styled = "\n".join(
        f"| {f.temperature} | {f.count} | {f.exact:.3f} | "
        + " | ".join(f"{f.first_style[axis.value]:.2f}" for axis in Axis)
        + f" | {f.hint_followed:.3f} | {f.exact_with_hint:.3f} |"
        for f in answers
    )
    axes = "; ".join(f"{axis.value}: {first.value} or {second.value}" for axis, (first, second) in STYLES.items())
    requests = sum(len(every_request(axis)) for axis in Axis)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != CARD)
    (folder / CARD).write_text(
        f"""\
# Clawloop's demo model

A toy language model of the Qwen3 architecture for `make demo ARGS="--quick"`: {plan.layers} layers of width \
{plan.hidden}, {size / 1e6:.1f} MB in all, weights stored in float16 and read as float32. It knows a small invented \
world of {requests} requests and nothing else, and it is of no use outside the demo.

- The {len(EVALUATION)} requests that the demo evaluates versions on are in no lesson, in either style; their \
subjects are, in other words.
- It answers each request in one of two styles, each about half of the time ({axes}).
- It follows a hint that stands where Clawloop puts hints.
- It is its own judge: it answers Clawloop's real judge prompts, for votes and for hints, in both answer forms.

## How it was made

From random weights by `clawloop demo pretrain`: {plan.steps} steps of {plan.lessons} lessons, seed {plan.seed}, \
in {cost}. All text is synthetic and made by `clawloop/app/demo/examples.py`; no other \
model and no person's data had a part in it. Judge prompts are made by `clawloop.core.judging` itself. Each line of \
their fixed text is one token of this model's vocabulary: after a change to those prompts the model is made anew.

## What was measured

Answers, sampled; exact = the right content in either style. The middle columns are the share of the first style of \
each axis (0.5 is even).

| temperature | answers | exact | {" | ".join(axis.value for axis in Axis)} | hint followed | exact with hint |
|---|---|---|---|---|---|---|---|
{styled}

The judge, in the grammar form unless it says "free form", on feedback that is not in the training data: whole \
phrases held out, whole sentence patterns held out, and a list of our own, typed by hand before there were patterns. \
Shares that are right; `bad` is how much of what says nothing was called bad.

| list | phrases | votes | liked | disliked | wished | unreadable | bad | hint | no hint |
|---|---|---|---|---|---|---|---|---|---|
{rows}

Weights: SHA-256 `{digest(folder)}`
""",
        encoding="utf-8",
    )
