"""Counts the input tokens of the scoring passes over a session, separate and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

from benchmarks.train_case import Case, Ids, hinted_prompts
from clawloop.core.contracts.training import BatchSample
from clawloop.core.ids import SampleId
from clawloop.training.batch import hinted_sequence
from clawloop.training.scoring import ScoringPass, shard_batch


class Tokens(NamedTuple):
    """Input tokens of one pass over a session.

    Args:
        plain: the plain documents, as read by reference, policy or the pass with gradient.
        hinted: each sample's hinted prompt and its response, as read by a separate teacher.
        joined: both in one pass, as when reference and teacher are the base model.
    """

    plain: int
    hinted: int
    joined: int


def tokens_of_session(ids: Sequence[Ids], case: Case, tokens: int) -> Tokens:
    """Count the input tokens if every sample has a hint.

    Args:
        ids: from `session_samples`; tokens: its argument.
        case: vocabulary and limits; hinted prompts may exceed them.
    """
    hinted = hinted_prompts(ids, tokens, case.shape.vocab_size)
    samples = [
        BatchSample(
            sample_id=SampleId(UUID(int=index)),
            prompt_ids=prompt,
            response_ids=response,
            logprobs=[-1.0] * len(response),
            temperature=1.0,
            version=1,
            reward=None,
            hinted_prompts={0: with_hint},
        )
        for index, ((prompt, response), with_hint) in enumerate(zip(ids, hinted, strict=True))
    ]
    joined = ScoringPass(version=0, reference=True, hinted=tuple(range(len(samples))))
    passes = (replace(joined, hinted=()), replace(joined, reference=False), joined)
    longest = max(hinted_sequence(sample).input_tokens for sample in samples)
    shard = shard_batch(samples, replace(case.limits, max_tokens=longest), passes, rank=0, world_size=1)
    return Tokens(*(sum(len(pack.tokens_S) for pack in shard.scored[one]) for one in passes))
