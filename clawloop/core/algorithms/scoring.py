"""Log-probabilities from logits, computed the same way for student, teacher and reference.

Takes the logits of response positions only, so that memory grows with the response and not with the prompt. Logits are
divided by the temperature the response was sampled at, else differences of scores would measure temperature.
Dimension suffixes: `_T` positions, `_V` vocabulary, `_K` top-k, `_H` hints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from clawloop.core.errors import StepDiverged, StreamsUnusable


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """A model's scores of the tokens of one response; the student's carry a gradient.

    Args:
        logprob_T: float[T], log-probs of the response's tokens, in nats.
        entropy_T: float[T], entropy of each position's distribution, in nats; None if not requested.
        topk_logprobs_TK: float[T, K], log-probs of given ids; None if not requested.
        tail_T: float[T], log-probability of all other ids together; None exactly when `topk_logprobs_TK` is.

    Raises:
        StreamsUnusable: lengths disagree.
        StepDiverged: a number is not finite.
    """

    logprob_T: Tensor
    entropy_T: Tensor | None = None
    topk_logprobs_TK: Tensor | None = None
    tail_T: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.topk_logprobs_TK is None) != (self.tail_T is None):
            raise StreamsUnusable("top-K log-probs and their tail come together")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if value.ndim != (2 if field.name.endswith("_TK") else 1) or len(value) != len(self.logprob_T):
                raise StreamsUnusable(f"{field.name} has shape {list(value.shape)} for {len(self.logprob_T)} tokens")
            if not bool(value.isfinite().all()):
                raise StepDiverged(f"{field.name} of a forward pass is not finite")

    def at(self, mask_T: Tensor) -> Scores:
        """The scores at the positions where `mask_T`, bool[T], is True.

        Raises:
            StreamsUnusable: the mask's length is not T.
        """
        if mask_T.shape != self.logprob_T.shape:
            raise StreamsUnusable(f"{len(self.logprob_T)} scores for {len(mask_T)} response tokens")
        values: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[mask_T] for name, value in values.items() if value is not None})


def score(
    logits_TV: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: float,
    topk_ids_TK: Tensor | None = None,
    entropy: bool = False,
) -> Scores:
    """Scores one response, or one chunk of its positions.

    Args:
        logits_TV: float[T, V], logits of the positions that predict the tokens.
        token_ids_T: int64[T], the response's ids.
        temperature: recorded when the response was sampled, > 0.
        topk_ids_TK: int64[T, K], further ids to score at each position.
        entropy: also compute the entropy.

    Raises:
        StreamsUnusable: lengths disagree, an id outside the vocabulary, or a temperature that is not finite and > 0.
        StepDiverged: a logit is not finite.
    """
    scaled_TV = _scaled(logits_TV, temperature)
    _check_ids(token_ids_T, scaled_TV)
    # One kernel forward and one backward; logsumexp and a difference take several passes over the vocabulary.
    logprob_TV = scaled_TV.log_softmax(dim=-1)
    logprob_T = logprob_TV.gather(-1, token_ids_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(dim=-1) if entropy else None
    if topk_ids_TK is None:
        return Scores(logprob_T=logprob_T, entropy_T=entropy_T)
    _check_ids(topk_ids_TK, scaled_TV)
    if topk_ids_TK.shape[-1] >= scaled_TV.shape[-1]:
        raise StreamsUnusable(f"top-{topk_ids_TK.shape[-1]} of {scaled_TV.shape[-1]} ids leaves no tail")
    # Summed over the other ids directly: 1 − Σ top-K loses every digit, and its gradient, where top-K is near 1.
    rest_TV = logprob_TV.scatter(-1, topk_ids_TK, float("-inf"))
    return Scores(
        logprob_T=logprob_T,
        entropy_T=entropy_T,
        topk_logprobs_TK=logprob_TV.gather(-1, topk_ids_TK),
        tail_T=rest_TV.logsumexp(dim=-1),
    )


def most_likely(logits_TV: Tensor, k: int) -> Tensor:
    """int64[T, k], the ids of each position's k largest logits; temperature does not change them."""
    if not 0 < k < logits_TV.shape[-1]:
        raise StreamsUnusable(f"top-{k} of {logits_TV.shape[-1]} ids leaves no tail")
    return logits_TV.detach().topk(k, dim=-1).indices


# Comparison of teachers -----------------------------------------------------------------------------------------------
# A teacher is the version that answered, after it has read a hint. Of several hints of a turn, each makes a teacher.
# Suffix `_H`: hints.

TopKOf: TypeAlias = Literal["student", "teacher", "overlap"]


class Comparison(NamedTuple):
    """A version without a hint and behind each of H hints, at K ids of each position. A tuple, as `TokenScores` is.

    Args:
        ids_HTK: int64[H, T, K].
        within_HTK: bool[H, T, K]; False = the id is not compared.
        answered_HTK: float[H, T, K], log-probs without a hint.
        teacher_HTK: float[H, T, K], log-probs of the teacher.
        tail_HT: float[H, T], the teacher's log-probability of all other ids together.
        overlap_HT: int64[H, T], number of ids that are among the K likeliest of both.
        distance_HT: float[H, T], KL(teacher ‖ version without a hint) over all ids, in nats.
    """

    ids_HTK: Tensor
    within_HTK: Tensor
    answered_HTK: Tensor
    teacher_HTK: Tensor
    tail_HT: Tensor
    overlap_HT: Tensor
    distance_HT: Tensor


def compare(
    logits: Iterable[Tensor], *, temperature: float, k: int, of: TopKOf, controlled: bool = False
) -> Comparison:
    """Compares logits without a hint with the teacher of each hint.

    The teacher is the reader of the hint. With a control log π_T = log π_v + log π_hint − log π_control, normalised:
    the version that answered, moved by what this hint changes beyond one that says nothing.

    Args:
        logits: float[T, V] without a hint, with `controlled` those behind the control, then those behind each hint. One
            at a time is asked for, overwritten, and let go before the next: together they would take much memory.
        of: whose k likeliest ids are compared; with `overlap` those of the version without a hint, where the teacher
            has them too.
    """
    documents = iter(logits)
    logits_TV = next(documents)
    student_TK = most_likely(logits_TV, k)
    answered_TV = _scaled(logits_TV, temperature).log_softmax(dim=-1)
    # What a hint's logits become a teacher's by. In place: each further copy takes much memory.
    moved_TV = logits_TV.sub_(next(documents)) if controlled else None
    del logits_TV
    rows = []
    for logits_TV in documents:
        if moved_TV is not None:
            logits_TV += moved_TV
        taught_TK = most_likely(logits_TV, k)
        teacher_TV = _scaled(logits_TV, temperature).log_softmax(dim=-1)
        del logits_TV
        in_both_TK = (student_TK[:, :, None] == taught_TK[:, None, :]).any(dim=-1)
        ids_TK = taught_TK if of == "teacher" else student_TK
        answered_TK, teacher_TK = answered_TV.gather(-1, ids_TK), teacher_TV.gather(-1, ids_TK)
        tail_T = teacher_TV.scatter(-1, ids_TK, float("-inf")).logsumexp(dim=-1)
        gap_TV = answered_TV - teacher_TV
        distance_T = -gap_TV.mul_(teacher_TV.exp_()).sum(dim=-1)  # in place, as nothing reads the teacher's after this
        rows.append(
            Comparison(
                ids_HTK=ids_TK,
                within_HTK=in_both_TK if of == "overlap" else torch.ones_like(in_both_TK),
                answered_HTK=answered_TK,
                teacher_HTK=teacher_TK,
                tail_HT=tail_T,
                overlap_HT=in_both_TK.sum(dim=-1),
                distance_HT=distance_T,
            )
        )
        del teacher_TV, gap_TV
    return Comparison(*(torch.stack(column) for column in zip(*rows, strict=True)))


def choose_hint(overlap_HT: Tensor, *, per_token: bool) -> Tensor:
    """int64[T], the hint that teaches each token: the one with the largest overlap, the first of equals.

    Args:
        overlap_HT: int64[H, T], of the tokens that are trained; of hints that may teach.
        per_token: choose for each token, and of equals the one with the larger overlap over the reply; otherwise one
            for the whole reply.
    """
    total_H = overlap_HT.sum(dim=-1)
    if not per_token:
        return total_H.argmax().expand(overlap_HT.shape[1])
    return (overlap_HT * (total_H.max() + 1) + total_H[:, None]).argmax(dim=0)


def _scaled(logits_TV: Tensor, temperature: float) -> Tensor:
    if not 0 < temperature < float("inf"):
        raise StreamsUnusable(f"temperature {temperature} is not finite and above 0")
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return wide_TV / temperature


def _check_ids(ids: Tensor, logits_TV: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.shape[0] != logits_TV.shape[0]:
        raise StreamsUnusable(f"ids {ids.dtype}{list(ids.shape)} for logits {list(logits_TV.shape)}")
    # Checked before gathering: on a GPU an out-of-range gather ends the process.
    if ids.numel() == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < logits_TV.shape[-1]:
        raise StreamsUnusable(f"no ids, or an id outside the vocabulary of {logits_TV.shape[-1]}")
