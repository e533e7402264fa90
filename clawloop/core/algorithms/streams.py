"""Per-token numbers of one sample's response, as tensors of one length.

A stream that is not known is None, never zeros: a part of the loss runs where its streams exist. Shapes and values are
checked on construction, so that the arithmetic need not. Dimension suffixes: `_T` response tokens, `_K` top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from clawloop.core.errors import NothingToTrain, StreamsUnusable

# A log-probability computed in float32 may round to just above 0.
_ABOVE_ZERO = 1e-4
# The K probabilities and their tail come from one softmax; float32 sums of 50 stay well inside this.
_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Streams:
    """The per-token numbers of one sample; nothing in them carries a gradient.

    Args:
        response_mask_T: bool[T]; True = this token is trained. At least one is True.
        behaviour_logprob_T: float[T], log-probs recorded when the token was sampled (log μ), in nats.
        advantage_T: float[T], A; > 0 makes the token more likely, < 0 less likely.
        teacher_logprob_T: float[T], log-probs of the same tokens under the teacher, which read the hint.
        answered_logprob_T: float[T], log-probs of the same tokens under the version that answered (log π_v), computed
            by the trainer as the teacher's are: μ has the engine's rounding in it, which is no advantage.
        reference_logprob_T: float[T], log-probs of the same tokens under the base model.
        prox_logprob_T: float[T], log-probs under the policy as the step began (decoupled correction only).
        teacher_topk_ids_TK: int64[T, K], the token ids at which student and teacher are compared.
        teacher_topk_logprobs_TK: float[T, K], the teacher's log-probs of these ids.
        teacher_tail_T: float[T], the teacher's log-probability of all other ids together.
        answered_topk_logprobs_TK: float[T, K], log-probs of these ids under the version that answered.
        topk_advantage_TK: float[T, K], the advantage of each of these ids; 0 for one that is not compared.

    Raises:
        StreamsUnusable: shapes disagree; a number is not finite; a log-prob is above 0; top-K is incomplete, has an
            id twice, or its probabilities and the tail do not add up to 1.
        NothingToTrain: no token, or none whose mask is True.
    """

    response_mask_T: Tensor
    behaviour_logprob_T: Tensor | None = None
    advantage_T: Tensor | None = None
    teacher_logprob_T: Tensor | None = None
    answered_logprob_T: Tensor | None = None
    reference_logprob_T: Tensor | None = None
    prox_logprob_T: Tensor | None = None
    teacher_topk_ids_TK: Tensor | None = None
    teacher_topk_logprobs_TK: Tensor | None = None
    teacher_tail_T: Tensor | None = None
    answered_topk_logprobs_TK: Tensor | None = None
    topk_advantage_TK: Tensor | None = None

    def __post_init__(self) -> None:
        mask_T = self.response_mask_T
        if mask_T.dtype != torch.bool or mask_T.ndim != 1:
            raise StreamsUnusable(f"response_mask_T is {mask_T.dtype}{list(mask_T.shape)}, not bool[T]")
        if not bool(mask_T.any()):
            raise NothingToTrain(f"a sample of {mask_T.numel()} tokens of which none is trained")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "response_mask_T":
                _check(field.name, value, mask_T.numel())
        self._check_top_k()

    def _check_top_k(self) -> None:
        ids_TK, logprobs_TK, tail_T = (
            self.teacher_topk_ids_TK,
            self.teacher_topk_logprobs_TK,
            self.teacher_tail_T,
        )
        if ids_TK is None and logprobs_TK is None and tail_T is None:
            return
        if ids_TK is None or logprobs_TK is None or tail_T is None:
            raise StreamsUnusable("top-K needs ids, log-probs and tail together")
        if ids_TK.shape != logprobs_TK.shape:
            raise StreamsUnusable(f"top-K ids {list(ids_TK.shape)} for log-probs {list(logprobs_TK.shape)}")
        if bool((ids_TK.sort(dim=-1).values.diff(dim=-1) == 0).any()):
            raise StreamsUnusable("a token id stands twice among the top-K of one position")
        mass_T = logprobs_TK.double().exp().sum(dim=-1) + tail_T.double().exp()
        if bool(((mass_T - 1).abs() > _MASS_TOLERANCE).any()):
            raise StreamsUnusable(f"top-K and tail add up to {mass_T.min():.3f}..{mass_T.max():.3f}, not to 1")

    def __len__(self) -> int:
        return self.response_mask_T.numel()

    @property
    def trained_tokens(self) -> int:
        return int(self.response_mask_T.sum())

    def trained(self) -> Streams:
        """The streams of the tokens whose mask is True: masked tokens cannot reach a loss, not even as 0 · NaN."""
        return self._map(lambda tensor: tensor[self.response_mask_T])

    def to(self, device: torch.device | str) -> Streams:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Streams:
        values: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def _check(name: str, value: Tensor, tokens: int) -> None:
    wide = name.endswith("_TK")
    if value.ndim != (2 if wide else 1) or value.shape[0] != tokens:
        raise StreamsUnusable(f"{name} has shape {list(value.shape)} for {tokens} response tokens")
    if name == "teacher_topk_ids_TK":
        if value.dtype != torch.int64 or value.shape[1] == 0 or bool((value < 0).any()):
            raise StreamsUnusable(f"{name} is {value.dtype}{list(value.shape)}, not token ids")
        return
    if not value.is_floating_point():
        raise StreamsUnusable(f"{name} is {value.dtype}, not a float type")
    if value.requires_grad:
        raise StreamsUnusable(f"{name} carries a gradient; only the student's scores may")
    if not bool(value.isfinite().all()):
        raise StreamsUnusable(f"{name} has a number that is not finite")
    if name not in ("advantage_T", "topk_advantage_TK") and bool((value > _ABOVE_ZERO).any()):
        raise StreamsUnusable(f"{name} has a log-probability above 0")


def logprobs_T(values: Sequence[float | None], *, name: str) -> Tensor:
    """float32[T] of log-probs as an engine or the store returns them.

    Raises:
        StreamsUnusable: a value is None. Engines return None for the first prompt token, so a None means that the
            list was cut at the wrong place; 0 in its place would mean probability 1.
    """
    known = [value for value in values if value is not None]
    if len(known) != len(values):
        raise StreamsUnusable(f"{name} is unknown at position {list(values).index(None)}")
    return torch.tensor(known, dtype=torch.float32)
