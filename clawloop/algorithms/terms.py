"""Which terms of the advantage a judged turn has, and so whether it makes a sample.

Knows nothing about tokens. Needs no torch, so that the judge's side can use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sample learns from; at least one of them.

    Args:
        reward: from the verdict; None if it says nothing.
        teacher: from the hint.
    """

    reward: float | None
    teacher: bool


def sample_terms(reward: float | None, *, hint: bool, verdicts: bool, hints: bool) -> Terms | None:
    """What a turn with this verdict and hint learns from; None: nothing, so no sample.

    Verdict ±1 and hint → both; hint only (verdict 0 or missing) → teacher; verdict only → reward.

    Args:
        reward: verdict, or what groups, shaping or an outcome made of it; None if there is none.
        hint: a hint was accepted.
        verdicts, hints: what the recipe's `signal` learns from.
    """
    kept = reward if verdicts and reward else None
    teacher = hint and hints
    return Terms(kept, teacher) if kept is not None or teacher else None
