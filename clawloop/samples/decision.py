"""The outcome of a judged turn: the terms of its training sample, or why there is none.

A sample's advantage has a reward term, a teacher term, or both; the trainer computes them. An absent term is None,
never 0: a sample without a hint has no teacher term, and one with verdict 0 has no reward term.
"""

from __future__ import annotations

from clawloop.contracts.turns import TurnOutcome
from clawloop.judging.hints import HintChoice
from clawloop.judging.records import TurnDecision
from clawloop.judging.voting import Verdict, signed
from clawloop.recipes.recipe import Signal


def decide(signal: Signal, verdict: Verdict, hint: HintChoice, not_trainable: str | None) -> TurnDecision:
    """The decision for a judged turn, as docs/learning.md describes.

    Args:
        signal: says whether the policy learns from verdicts and from hints.
        not_trainable: the reason `why_not_trainable` gave; such a turn is judged and shown, but not sampled.
    """
    reward = (verdict.reward or None) if signal.verdicts else None
    text = hint.text if signal.hints else None
    why = _why(signal, verdict, hint)
    if reward is None and text is None:
        unknown = verdict.verdict is None if signal.verdicts else not hint.answered
        return TurnDecision(TurnOutcome.UNJUDGED if unknown else TurnOutcome.UNDECIDED, why)
    if not_trainable is not None:
        return TurnDecision(TurnOutcome.NOT_TRAINABLE, f"{not_trainable} ({why})")
    return TurnDecision(TurnOutcome.SAMPLED, why, reward, text)


def _why(signal: Signal, verdict: Verdict, hint: HintChoice) -> str:
    of_verdict = verdict.why if verdict.verdict is None else f"verdict {signed(verdict.verdict)}: {verdict.why}"
    of_hint = f"no hint: {hint.why}" if hint.text is None else f"hint: {hint.why}"
    return "; ".join([of_verdict] * signal.verdicts + [of_hint] * signal.hints)
