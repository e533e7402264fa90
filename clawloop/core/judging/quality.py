"""Quality of a judge's votes: calibrated on phrases with a known vote, and measured on others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawloop.core.judging.agreement import Pair, agreement
from clawloop.core.judging.phrases import KINDS, Phrase
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.judging.voting import Vote, direct_vote

CALIBRATED = "examples, calibrated"
"""The form `examples` with biases, as trials name it."""
LEAST_KAPPA = 0.4
"""Cohen's kappa below which votes are noise to a policy: "fair" at best (Landis and Koch 1977)."""
# Weight of a bias's square beside the mean log-likelihood: a list that a judge answers perfectly has no finite biases.
_RIDGE = 1e-3

Biases = Mapping[Vote, float]
"""What is added to the log-probs of a judge's three answers, in nats; that of 0 is 0."""


def fit_biases(answers: Sequence[Mapping[Vote, float]], votes: Sequence[Vote]) -> dict[Vote, float]:
    """Biases of greatest likelihood, each of the three votes with the same weight, by Newton's method.

    Args:
        answers: log-probs of the three votes, one for each phrase.
        votes: the right ones.
    """
    counts = Counter(votes)
    weights = [1 / (len(counts) * counts[vote]) for vote in votes]
    up = down = 0.0
    for _ in range(50):
        gradient, curvature = [-_RIDGE * up, -_RIDGE * down], [[_RIDGE, 0.0], [0.0, _RIDGE]]
        for answer, vote, weight in zip(answers, votes, weights, strict=True):
            shares = _shares(biased(answer, {1: up, 0: 0.0, -1: down}))
            p, q = shares[1], shares[-1]
            gradient[0] += weight * ((vote == 1) - p)
            gradient[1] += weight * ((vote == -1) - q)
            curvature[0][0] += weight * p * (1 - p)
            curvature[1][1] += weight * q * (1 - q)
            curvature[0][1] -= weight * p * q
        (a, b), (_, d) = curvature[0], curvature[1]
        determinant = a * d - b * b
        step = (d * gradient[0] - b * gradient[1]) / determinant, (a * gradient[1] - b * gradient[0]) / determinant
        # At most a nat at a time: far from the optimum a Newton step overshoots.
        up, down = (value + max(-1.0, min(1.0, moved)) for value, moved in zip((up, down), step, strict=True))
        if max(map(abs, step)) < 1e-9:
            break
    return {1: up, 0: 0.0, -1: down}


def biased(answer: Mapping[Vote, float], biases: Biases) -> dict[Vote, float]:
    """Log-probs of the three votes with the biases added, normalised."""
    raised = {vote: logprob + biases[vote] for vote, logprob in answer.items()}
    peak = max(raised.values())
    total = peak + math.log(sum(math.exp(value - peak) for value in raised.values()))
    return {vote: value - total for vote, value in raised.items()}


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of how often a judge votes rightly.

    Args:
        phrases: with and without an answer.
        accuracy: share of right votes, a missing one counted as wrong.
        kappa: Cohen's, over those with a vote; 0 where the judge always votes the same.
        by_kind: phrases of the kind, and right votes on them.
    """

    phrases: int
    accuracy: float
    kappa: float
    by_kind: Mapping[str, tuple[int, int]]


def quality(phrases: Sequence[Phrase], votes: Sequence[Vote | None]) -> Quality:
    """The quality of these votes on phrases whose right vote is known."""
    found = agreement(Pair(0, phrase.vote, vote) for phrase, vote in zip(phrases, votes, strict=True))
    by_kind: dict[str, tuple[int, int]] = {
        kind: (len(right), sum(right))
        for kind in KINDS
        if (right := [vote == one.vote for one, vote in zip(phrases, votes, strict=True) if one.kind == kind])
    }
    return Quality(len(phrases), found.agreed / len(phrases), found.kappa or 0.0, by_kind)


def direct_votes(answers: Sequence[Mapping[Vote, float]], biases: Biases | None = None) -> list[Vote | None]:
    """The direct vote of each answer."""
    return [direct_vote(answer if biases is None else biased(answer, biases)).verdict for answer in answers]


@dataclass(frozen=True, slots=True)
class JudgeTrial:
    """Result of a judge's trial.

    Args:
        judge: the model's name where it is asked.
        digest: of the model, see `JudgeClient.identity`.
        form: in which it judges best.
        biases: fitted for `examples`, where they help.
        by_form: its quality on the list that the form was chosen by: present prompt, examples, `CALIBRATED`.
        reported: its quality in that form on a list that nothing was chosen by; on an operator's file, that file's.
    """

    judge: str
    digest: str
    form: AnswerForm
    biases: Biases | None
    by_form: Mapping[str, Quality]
    reported: Quality

    @property
    def votes_off(self) -> str | None:
        """The reason not to ask this judge for votes and hints; None if they count."""
        kappa = self.by_form[self.form if self.biases is None else CALIBRATED].kappa
        if kappa >= LEAST_KAPPA:
            return None
        return (
            f"votes and hints are off: {self.judge} agrees with labelled phrases by a kappa of {kappa:.2f}, and"
            f" {LEAST_KAPPA:g} is needed: learn by the recipe `hindsight`, which asks none, or choose another judge"
            " (`clawloop judge try` shows how good one is)"
        )


def _shares(logprobs: Mapping[Vote, float]) -> dict[Vote, float]:
    return {vote: math.exp(logprob) for vote, logprob in logprobs.items()}
