"""A slow implementation of advantages and loss on Python floats, without torch.

Written from the formulas of docs/learning.md, and from nothing in clawloop. Weights that carry no
gradient are computed from `frozen` logits, so that central differences over `logits` give the gradient that is meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Vector = list[float]
Matrix = list[list[float]]


@dataclass
class PlainSample:
    """One sample; T = tokens, V = vocabulary. None: not known."""

    logits: Matrix
    ids: list[int]
    mask: list[bool]
    temperature: float
    behaviour: Vector
    advantage: Vector | None = None
    reference: Vector | None = None
    prox: Vector | None = None
    teacher: Vector | None = None
    answered: Vector | None = None
    answered_topk: Matrix | None = None
    within: list[list[bool]] | None = None
    topk_ids: list[list[int]] | None = None
    topk_logprobs: Matrix | None = None
    tail: Vector | None = None


@dataclass
class PlainPlan:
    policy_gradient: float = 1.0
    distillation: float = 0.0
    kl: float = 0.02
    entropy: float = 0.0
    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0
    decoupled: bool = False
    sequence: bool = False
    forward: bool = False
    clipped: bool = False
    gap_clip: float = 1.0
    centred: bool = False


@dataclass
class PlainTerms:
    """What an advantage is made of."""

    verdict_weight: float = 1.0
    teacher_weight: float = 1.0
    gap_clip: float = 2.0
    spare: float = 0.0
    centred: bool = False


def advantage(sample: PlainSample, reward: float | None, terms: PlainTerms) -> Vector | None:
    """A_t = w_rl·r + w_opd·gap of the terms there are; None if there is neither: no sample.

    A verdict of 0 is none. Blame, all terms together, is times 1 − share·(1 − μ).
    """
    by_verdict = reward is not None and reward != 0 and terms.verdict_weight > 0
    by_hint = sample.teacher is not None and terms.teacher_weight > 0
    if not by_verdict and not by_hint:
        return None
    middle = 0.0
    if by_hint and terms.centred:
        assert sample.teacher is not None
        assert sample.answered is not None
        gaps = [after - before for after, before in zip(sample.teacher, sample.answered, strict=True)]
        trained = [gap for gap, on in zip(gaps, sample.mask, strict=True) if on]
        middle = sum(trained) / len(trained)
    found = []
    for t, behaviour in enumerate(sample.behaviour):
        value = 0.0
        if by_verdict:
            assert reward is not None
            value += terms.verdict_weight * reward
        if by_hint:
            assert sample.teacher is not None
            assert sample.answered is not None
            gap = sample.teacher[t] - sample.answered[t] - middle
            value += terms.teacher_weight * max(-terms.gap_clip, min(terms.gap_clip, gap))
        if value < 0:
            value *= 1 - terms.spare * (1 - math.exp(behaviour))
        found.append(value)
    return found


def log_softmax(logits: Vector, temperature: float) -> Vector:
    scaled = [value / temperature for value in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(value - top) for value in scaled))
    return [value - total for value in scaled]


def clipped(ratio: float, advantage: float, plan: PlainPlan) -> float:
    if advantage >= 0:
        return min(ratio, 1 + plan.high) * advantage
    return min(max(ratio, 1 - plan.low), plan.dual) * advantage


def divergence(student: float, teacher: float, plan: PlainPlan) -> float:
    """One bin's share, from log-probabilities."""
    if plan.forward:
        return math.exp(teacher) * (teacher - student)
    return math.exp(student) * (student - teacher)


def expected_gap(sample: PlainSample, t: int) -> float:
    """Σ_k w_k·(log π_T(k) − log π_v(k)) over the support of a position; 0 for an empty one."""
    assert sample.topk_logprobs is not None
    assert sample.answered_topk is not None
    assert sample.within is not None
    teacher, answered = sample.topk_logprobs[t], sample.answered_topk[t]
    inside = [k for k, known in enumerate(sample.within[t]) if known]
    total = sum(math.exp(answered[k]) for k in inside)
    return sum(math.exp(answered[k]) / total * (teacher[k] - answered[k]) for k in inside)


def support_loss(sample: PlainSample, t: int, logprobs: Vector, plan: PlainPlan) -> float:
    """−Σ_k of the clipped objective of each id, with w_k·clip(log π_T(k) − log π_v(k)) as its advantage."""
    assert sample.topk_ids is not None
    assert sample.topk_logprobs is not None
    assert sample.answered_topk is not None
    assert sample.within is not None
    ids, teacher, answered = sample.topk_ids[t], sample.topk_logprobs[t], sample.answered_topk[t]
    inside = [k for k, known in enumerate(sample.within[t]) if known]
    total = sum(math.exp(answered[k]) for k in inside)
    middle = 0.0
    if plan.centred:
        trained = [expected_gap(sample, u) for u, on in enumerate(sample.mask) if on]
        middle = sum(trained) / len(trained)
    loss = 0.0
    for k in inside:
        gap = max(-plan.gap_clip, min(plan.gap_clip, teacher[k] - answered[k] - middle))
        ratio = math.exp(logprobs[ids[k]] - answered[k])
        loss -= clipped(ratio, math.exp(answered[k]) / total * gap, plan)
    return loss


def token_loss(sample: PlainSample, t: int, plan: PlainPlan, frozen: Vector) -> float:
    """`frozen`: the logits of this position that weights are computed from."""
    logprobs = log_softmax(sample.logits[t], sample.temperature)
    own = logprobs[sample.ids[t]]
    frozen_own = log_softmax(frozen, sample.temperature)[sample.ids[t]]
    loss = 0.0
    if plan.policy_gradient and sample.advantage is not None:
        old, weight = sample.behaviour[t], 1.0
        if plan.decoupled:
            assert sample.prox is not None
            old, weight = sample.prox[t], min(2.0, math.exp(sample.prox[t] - sample.behaviour[t]))
        loss -= plan.policy_gradient * weight * clipped(math.exp(own - old), sample.advantage[t], plan)
    if plan.distillation and sample.topk_ids is not None:
        assert sample.topk_logprobs is not None
        assert sample.tail is not None
        rest = 1.0
        for token, teacher in zip(sample.topk_ids[t], sample.topk_logprobs[t], strict=True):
            p = math.exp(logprobs[token])
            rest -= p
            if not plan.clipped:
                loss += plan.distillation * divergence(logprobs[token], teacher, plan)
        loss += plan.distillation * (
            support_loss(sample, t, logprobs, plan)
            if plan.clipped
            else divergence(math.log(rest), sample.tail[t], plan)
        )
    if plan.kl and sample.reference is not None:
        distance = own - sample.reference[t]
        weight = min(2.0, math.exp(frozen_own - sample.behaviour[t]))
        loss += plan.kl * weight * distance**2 / 2
    if plan.entropy:
        loss += plan.entropy * sum(math.exp(value) * value for value in logprobs)
    return loss


def batch_loss(batch: list[PlainSample], plan: PlainPlan, frozen: list[Matrix] | None = None) -> float:
    """The loss of a whole step."""
    kept = [[t for t, on in enumerate(sample.mask) if on] for sample in batch]
    tokens = sum(len(positions) for positions in kept)
    total = 0.0
    for index, (sample, positions) in enumerate(zip(batch, kept, strict=True)):
        weights = frozen[index] if frozen is not None else sample.logits
        losses = [token_loss(sample, t, plan, weights[t]) for t in positions]
        total += sum(losses) / len(losses) / len(batch) if plan.sequence else sum(losses) / tokens
    return total


def near_a_kink(batch: list[PlainSample], plan: PlainPlan, margin: float = 1e-3) -> bool:
    """True if a ratio lies so near a clip bound that a central difference would straddle it."""
    for sample in batch:
        for t, token in enumerate(sample.ids):
            own = log_softmax(sample.logits[t], sample.temperature)[token]
            old = sample.prox[t] if plan.decoupled and sample.prox is not None else sample.behaviour[t]
            ratios = [math.exp(own - old)]
            if sample.topk_ids is not None and sample.answered_topk is not None:
                own_row = log_softmax(sample.logits[t], sample.temperature)
                pairs = zip(sample.topk_ids[t], sample.answered_topk[t], strict=True)
                ratios += [math.exp(own_row[id_] - before) for id_, before in pairs]
            bounds = (1 - plan.low, 1 + plan.high, plan.dual)
            if any(abs(ratio - bound) < margin for ratio in ratios for bound in bounds):
                return True
    return False
