"""The check of a step's numbers: loss, gradient norm, and how far the version moved.

Medians, clipped means and shares of tokens only: the mean of an unbounded figure can be that of one token.
"""

from __future__ import annotations

from clawloop.contracts.gate_checks import CheckName, CheckResult, GateCheck
from clawloop.contracts.training import StepFigures
from clawloop.recipes.recipe import Gate


def check_numbers(figures: StepFigures, gate: Gate) -> GateCheck:
    """The check that a step's numbers are within the recipe's limits."""
    parent, base = figures.to_parent, figures.to_base
    measured = {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "parent_distance": None if parent is None else parent.mean,
        "parent_median": None if parent is None else parent.median,
        "token_share": None if parent is None else parent.share,
        "base_distance": None if base is None else base.mean,
        "base_median": None if base is None else base.median,
    }
    limits = {
        "loss": ("|loss|", gate.loss),
        "grad_norm": ("gradient norm", gate.grad_norm),
        "parent_distance": ("distance to the parent", gate.parent_distance),
        "token_share": (f"share of tokens over {gate.token_distance:g} nats from the parent", gate.token_share),
        "base_distance": ("distance to the base", gate.base_distance),
    }
    beyond = [
        f"{words} {value:.3g}, limit {limit:g} (gate.{key})"
        for key, (words, limit) in limits.items()
        # `not <=`, so that NaN is beyond every limit.
        if (value := measured[key]) is not None and not abs(value) <= limit
    ]
    reason = "; ".join(beyond) if beyond else "within limits"
    return GateCheck(CheckName.NUMBERS, CheckResult.FAILED if beyond else CheckResult.PASSED, reason, measured)
