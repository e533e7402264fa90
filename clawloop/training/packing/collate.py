"""Micro-batches: token sequences of unequal length, concatenated without padding, shared prefixes computed once.

The only tokens that belong to no sample are those of `filler()`. Dimension suffixes: `_S` tokens of the micro-batch,
`_N` response positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clawloop.training.packing.prefix_tree import AttentionLayout, build_prefix_tree
from clawloop.training.packing.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S tokens of several documents, with N response positions.

    Args:
        tokens_S: int64[S] token ids; a prefix that documents share is there once.
        positions_S: int64[S]; each token's position in its document.
        layout: which tokens attend to which; a document's tokens attend to its own tokens only.
        rows_N: int64[N]; index in S of the hidden state that predicts a response token. Documents may share rows.
        targets_N: int64[N]; the response token it predicts.
        response_lengths: response tokens of each document, adding up to N.
        temperatures: the divisor of each document's logits.
        members: the key of each document among those passed to `collate`; empty for a filler.
    """

    tokens_S: Tensor
    positions_S: Tensor
    layout: AttentionLayout
    rows_N: Tensor
    targets_N: Tensor
    response_lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    members: tuple[int, ...]

    @property
    def is_filler(self) -> bool:
        return not self.members

    def to(self, device: torch.device) -> MicroBatch:
        return replace(
            self,
            tokens_S=self.tokens_S.to(device),
            positions_S=self.positions_S.to(device),
            rows_N=self.rows_N.to(device),
            targets_N=self.targets_N.to(device),
        )

    def split(self, values_N: Tensor) -> dict[int, Tensor]:
        """Values at the N response positions, split into one tensor per member."""
        if self.is_filler:
            return {}
        parts = torch.split(values_N, list(self.response_lengths))
        return dict(zip(self.members, parts, strict=True))

    def join(self, values: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """The inverse of `split`: values of this micro-batch's members, picked from all and concatenated to [N, …]."""
        parts = [values[member] for member in self.members]
        if [len(part) for part in parts] != list(self.response_lengths):
            raise ValueError(f"lengths {[len(p) for p in parts]} for responses of {self.response_lengths}")
        return torch.cat(parts)


def collate(
    sequences: Sequence[TokenSequence] | Mapping[int, TokenSequence],
    members: Sequence[int],
    *,
    share_prefixes: bool = True,
) -> MicroBatch:
    """The sequences with these indices or keys as one micro-batch on the CPU."""
    documents = [sequences[member].input_ids() for member in members]
    tree = build_prefix_tree(documents, share=share_prefixes)
    tokens: list[int] = []
    positions: list[int] = []
    branch_starts: list[int] = []
    for branch in tree.branches:
        branch_starts.append(len(tokens))
        tokens.extend(documents[branch.document][branch.start : branch.end])
        positions.extend(range(branch.start, branch.end))
    rows: list[int] = []
    targets: list[int] = []
    for document, member in enumerate(members):
        sequence = sequences[member]
        first = len(sequence.prompt_ids) - 1
        for index, start, end in tree.spans(document, sequence.input_tokens):
            shift = branch_starts[index] - tree.branches[index].start
            rows.extend(range(max(start, first) + shift, end + shift))
        targets.extend(sequence.response_ids)
    return MicroBatch(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        tree.layout(),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        tuple(len(sequences[member].response_ids) for member in members),
        tuple(sequences[member].temperature for member in members),
        tuple(members),
    )


def filler() -> MicroBatch:
    """A micro-batch of one token of no sample, for a rank with fewer micro-batches: all ranks run as many forwards.

    Its loss is multiplied by zero.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(zero, zero, AttentionLayout((1,), (1,), ((0,),)), zero, zero, (1,), (1.0,), ())
