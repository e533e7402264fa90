"""Figures of one sample in one forward pass, as plain numbers; None where a figure is not known for the sample."""

from __future__ import annotations

import torch

from clawloop.algorithms.kl import kl_distance
from clawloop.algorithms.policy_gradient import Clip, is_clipped, ratio
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.streams import Streams
from clawloop.contracts.training import SampleMetrics
from clawloop.recipes.recipe import Bounds


@torch.no_grad()
def sample_metrics(scores: Scores, streams: Streams, clip: Clip, bounds: Bounds) -> SampleMetrics:
    """The metrics of one sample; `scores` and `streams` hold its trained tokens only."""
    found: dict[str, torch.Tensor] = {}
    if streams.behaviour_logprob_T is not None:
        ratio_N = ratio(scores.logprob_T, streams.behaviour_logprob_T)
        found["ratio_mean"], found["ratio_max"] = ratio_N.mean(), ratio_N.max()
        found["bounded_ratio"] = ratio_N.clamp(max=2 * bounds.ratio).mean()
        found["mean_abs_log_ratio"] = (scores.logprob_T - streams.behaviour_logprob_T).abs().mean()
        if streams.advantage_T is not None:
            base_N = ratio_N if streams.prox_logprob_T is None else ratio(scores.logprob_T, streams.prox_logprob_T)
            found["clip_share"] = is_clipped(base_N, streams.advantage_T, clip).double().mean()
    if streams.reference_logprob_T is not None and streams.behaviour_logprob_T is not None:
        kl_N = kl_distance(scores.logprob_T, streams.behaviour_logprob_T, streams.reference_logprob_T)
        found["kl"], found["bounded_kl"] = kl_N.mean(), kl_N.clamp(max=2 * bounds.kl).mean()
    if scores.entropy_T is not None:
        found["entropy"] = scores.entropy_T.mean()
    # One transfer from the device for all figures.
    numbers = torch.stack([value.double() for value in found.values()]).tolist() if found else []
    known: dict[str, float] = dict(zip(found, numbers, strict=True))
    return SampleMetrics(
        tokens=len(streams),
        ratio_mean=known.get("ratio_mean"),
        ratio_max=known.get("ratio_max"),
        mean_abs_log_ratio=known.get("mean_abs_log_ratio"),
        clip_share=known.get("clip_share"),
        kl=known.get("kl"),
        entropy=known.get("entropy"),
        bounded_ratio=known.get("bounded_ratio"),
        bounded_kl=known.get("bounded_kl"),
    )
