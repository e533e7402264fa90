"""Distance of a step's version from its parent and from the base, on the tokens it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from clawloop.algorithms.streams import Streams
from clawloop.contracts.training import Distance
from clawloop.recipes.gate import TOKEN_LIMIT
from clawloop.training.ranks.collectives import Ranks


def distance(
    of: Mapping[int, Tensor], to: Mapping[int, Tensor], streams: Mapping[int, Streams], far: float, ranks: Ranks
) -> Distance | None:
    """The distance over the trained tokens of all ranks; None if a member has no log-probs to compare with.

    Args:
        of: member → float[T], log-probs of the new version.
        to: likewise of the version to compare with.
        streams: members that were trained, with their masks.
        far: beyond this a token counts as far.
    """
    gaps = {
        member: (of[member] - to[member]).abs()[of_member.response_mask_T]
        for member, of_member in streams.items()
        if member in of and member in to
    }
    complete = gaps.keys() == streams.keys()
    values = torch.cat([gap_T.double().cpu() for gap_T in gaps.values()]).tolist() if gaps else []
    gathered = ranks.all_gather((complete, values))
    all_values = torch.tensor(list(chain.from_iterable(part for _, part in gathered)), dtype=torch.float64)
    if not all(known for known, _ in gathered) or not len(all_values):
        return None
    return Distance(
        mean=float(all_values.clamp(max=TOKEN_LIMIT).mean()),
        median=float(all_values.median()),
        share=float((all_values > far).double().mean()),
    )


def token_moves(
    new: Mapping[int, Tensor], before: Mapping[int, Tensor], streams: Mapping[int, Streams]
) -> dict[int, list[float | None]]:
    """Member → by how much each token's log-probability changed, None for a token that was not trained.

    Args:
        new: member → float[T], log-probs of the version that the step made.
        before: likewise as the step began.
        streams: members that were trained, with their masks.
    """
    return {
        member: [
            moved if trained else None
            for moved, trained in zip(
                (new[member] - before[member]).tolist(), of_member.response_mask_T.bool().tolist(), strict=True
            )
        ]
        for member, of_member in streams.items()
    }
