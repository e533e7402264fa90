"""The samples of a step, as sequences to be read and as work shared out among ranks.

Knows nothing about models or losses. Every rank computes the same plan for all ranks from the same batch, so
that nobody has to ask how many forwards the others will run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clawloop.errors import SampleUnusable
from clawloop.training.collate import Limits, Packed, TokenSequence, collate, filler, plan

Bins: TypeAlias = Sequence[tuple[int, ...]]
"""Micro-batches, as indices in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One judged response, as a step takes it.

    Args:
        key: its id, for errors and metrics; different for each sample of a batch.
        prompt_ids, response_ids: the engine's own.
        behaviour_logprobs: recorded when sampling, one for each response token.
        temperature: recorded when sampling.
        version: the version that answered; 0 is the base model. It is the teacher of its own hint.
        reward: what the verdict came to; None if it says nothing.
        hinted_prompt_ids: the prompt with the hint in it; None if there is no hint.
        response_mask: True = trained; None: every response token is.
        explicit: it comes from explicit feedback: it does not age, but is dropped if the policy has drifted.

    Raises:
        SampleUnusable: lengths disagree.
    """

    key: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    temperature: float
    version: int
    reward: float | None
    hinted_prompt_ids: Sequence[int] | None = None
    response_mask: Sequence[bool] | None = None
    explicit: bool = False

    def __post_init__(self) -> None:
        for what, values in (("log-probs", self.behaviour_logprobs), ("mask", self.response_mask)):
            if values is not None and len(values) != len(self.response_ids):
                raise SampleUnusable(
                    self.key, f"{what} of length {len(values)} for {len(self.response_ids)} response tokens"
                )

    def sequence(self) -> TokenSequence:
        return TokenSequence(self.key, self.prompt_ids, self.response_ids, self.temperature)

    def hinted_sequence(self) -> TokenSequence:
        """The same response after the prompt with the hint; only if there is one."""
        assert self.hinted_prompt_ids is not None
        return TokenSequence(f"{self.key} with hint", self.hinted_prompt_ids, self.response_ids, self.temperature)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch.

    Args:
        packs: its micro-batches; as many as every other rank has, the last ones perhaps fillers.
        hinted_packs: teacher's version → the same, over this rank's samples with a hint, in order of version.
    """

    packs: tuple[Packed, ...]
    hinted_packs: Mapping[int, tuple[Packed, ...]]


def share_out(
    samples: Sequence[TrainingSample],
    limits: Limits,
    *,
    teacher: Literal["policy", "base"] | None,
    rank: int,
    world: int,
) -> Share:
    """This rank's part. A sample's teacher forward runs on the rank that trains it.

    Args:
        samples: the whole batch, the same on every rank.
        limits: what the trainer takes, for hinted prompts too.
        teacher: who reads the hinted prompts: the version that answered, the base model, or nobody.
        rank, world: of how many.

    Raises:
        SampleUnusable: see `plan`; on every rank alike.
    """
    sequences = {index: sample.sequence() for index, sample in enumerate(samples)}
    bins = plan(list(sequences.values()), limits)
    per_rank: list[Bins] = [bins[first::world] for first in range(world)]
    hinted: dict[int, dict[int, TokenSequence]] = {}
    for index, sample in enumerate(samples):
        if teacher is not None and sample.hinted_prompt_ids is not None:
            version = 0 if teacher == "base" else sample.version
            hinted.setdefault(version, {})[index] = sample.hinted_sequence()
    return Share(
        _packs(sequences, per_rank, rank, limits),
        {
            version: _packs(of_version, _plan_per_rank(of_version, per_rank, limits), rank, limits)
            for version, of_version in sorted(hinted.items())
        },
    )


def _plan_per_rank(hinted: Mapping[int, TokenSequence], per_rank: Sequence[Bins], limits: Limits) -> list[Bins]:
    planned: list[Bins] = []
    for bins in per_rank:
        own = [index for members in bins for index in members if index in hinted]
        places = plan([hinted[index] for index in own], limits)
        planned.append([tuple(own[place] for place in members) for members in places])
    return planned


def _packs(
    sequences: Mapping[int, TokenSequence], per_rank: Sequence[Bins], rank: int, limits: Limits
) -> tuple[Packed, ...]:
    packs = [collate(sequences, members, share_prefixes=limits.share_prefixes) for members in per_rank[rank]]
    missing = max(len(bins) for bins in per_rank) - len(packs)
    return tuple(packs + [filler()] * missing)
