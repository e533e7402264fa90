"""Samples of unequal length laid end to end under a token budget, and the way back.

Knows nothing about models or losses. Nothing is cut and nothing is padded: a sample that does not fit raises,
and the only tokens that belong to no sample are those of `filler()`, which says so itself. What samples have in
common from the first token on is read once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clawloop.errors import SampleUnusable
from clawloop.training.packing.prefix_tree import Gathered, Layout, Overlaps, grow


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One prompt and the response sampled after it.

    Args:
        key: what errors call it, e.g. the sample's id.
        prompt_ids: at least one.
        response_ids: at least one; each is predicted from everything before it.
        temperature: what the logits are divided by, as recorded when sampling; above 0.

    Raises:
        SampleUnusable: it has no prompt, no response, or was not sampled at a temperature above 0.
    """

    key: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise SampleUnusable(self.key, "prompt and response need at least one token each")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SampleUnusable(self.key, f"temperature {self.temperature} cannot be trained")

    @property
    def input_tokens(self) -> int:
        """Tokens the model reads: the last response token is predicted, never read."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    def input_ids(self) -> list[int]:
        """The tokens the model reads."""
        return [*self.prompt_ids, *self.response_ids[:-1]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the trainer takes.

    Args:
        budget_tokens: tokens read in one micro-batch, a common beginning counted once. A longer sample is read all the
            same, and beside a long one up to half the budget of what is added by those it shares most of them with.
        max_tokens: tokens read of one sample; the model's positions end there, or the memory does.
        vocab_size: ids at or above it raise (on a GPU they would end the process).
        share_prefixes: read a common beginning once; False to measure what that saves.
    """

    budget_tokens: int
    max_tokens: int
    vocab_size: int
    share_prefixes: bool = True

    def room(self, longest: int | None) -> int:
        """Most tokens of a micro-batch that one more sample may join.

        A chat's prompts may each fill the budget, and differ in their last few hundred tokens: held to the budget,
        each would be read by itself, from its first token on.

        Args:
            longest: of those that share most of their tokens with the sample, itself included; None if none does.
        """
        if longest is None:
            return self.budget_tokens
        return max(self.budget_tokens, longest + self.budget_tokens // 2)


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch: S tokens of several documents end to end, N response positions among them.

    Args:
        tokens_S: int64 token ids; a beginning that documents share stands there once.
        positions_S: int64; each token's place in its document.
        layout: what attends to what; never to another document's tokens that are not its own as well.
        rows_N: int64; index in S whose hidden state predicts a response token. Documents may share rows.
        targets_N: int64; the response token it predicts.
        response_lengths: response tokens of each document, adding up to N.
        temperatures: what the logits of each document are divided by.
        members: the number of each document among those collated from; empty for a filler.
    """

    tokens_S: Tensor
    positions_S: Tensor
    layout: Layout
    rows_N: Tensor
    targets_N: Tensor
    response_lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    members: tuple[int, ...]

    @property
    def is_filler(self) -> bool:
        return not self.members

    def to(self, device: torch.device) -> Packed:
        return replace(
            self,
            tokens_S=self.tokens_S.to(device),
            positions_S=self.positions_S.to(device),
            rows_N=self.rows_N.to(device),
            targets_N=self.targets_N.to(device),
        )

    def split(self, values_N: Tensor) -> dict[int, Tensor]:
        """Values at the response positions, as one tensor for each member."""
        if self.is_filler:
            return {}
        parts = torch.split(values_N, list(self.response_lengths))
        return dict(zip(self.members, parts, strict=True))

    def join(self, values: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """The reverse of `split`: values of all documents, by number → those of this micro-batch."""
        parts = [values[member] for member in self.members]
        if [len(part) for part in parts] != list(self.response_lengths):
            raise ValueError(f"lengths {[len(p) for p in parts]} for responses of {self.response_lengths}")
        return torch.cat(parts)


class _Bin:
    """A micro-batch as it fills.

    Attributes:
        chats: of each member, the first member of the chat it belongs to.
        read: tokens.
    """

    def __init__(self, overlaps: Overlaps):
        self.chats: dict[int, int] = {}
        self.read = 0
        self._gathered = Gathered(overlaps)
        self._longest: dict[int, int] = {}  # of each chat

    def needs(self, index: int, length: int) -> tuple[int, int | None]:
        """What one more adds, and `Limits.room`'s longest."""
        shared, chat = self._shared(index, length)
        return length - shared, None if chat is None else max(length, self._longest[chat])

    def add(self, index: int, length: int) -> None:
        shared, chat = self._shared(index, length)
        self.read += length - shared
        self.chats[index] = chat = index if chat is None else chat
        self._longest[chat] = max(length, self._longest.get(chat, 0))
        self._gathered.add(index)

    def _shared(self, index: int, length: int) -> tuple[int, int | None]:
        """How many tokens of one more are there already; and whose chat it belongs to: that of most of its tokens."""
        shared, other = self._gathered.shared(index)
        return shared, None if other is None or 2 * shared < length else self.chats[other]


def plan(sequences: Sequence[TokenSequence], limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Which samples share a micro-batch: those with a common beginning, then first fit, longest first.

    Returns:
        Indices of `sequences`, each exactly once. The same input gives the same plan on every rank.

    Raises:
        SampleUnusable: a sample is too long, or has an id the vocabulary does not.
    """
    for sequence in sequences:
        _check(sequence, limits)
    overlaps = Overlaps([sequence.input_ids() for sequence in sequences], share=limits.share_prefixes)
    bins: list[_Bin] = []
    for index in overlaps.neighbours():
        length = sequences[index].input_tokens
        fitting: list[tuple[int, int]] = []
        for place, one in enumerate(bins):
            need, longest = one.needs(index, length)
            if one.read + need <= limits.room(longest):
                fitting.append((need, place))
        _, place = min(fitting, default=(length, len(bins)))
        if place == len(bins):
            bins.append(_Bin(overlaps))
        bins[place].add(index, length)
    return tuple(tuple(sorted(one.chats)) for one in bins)


def _check(sequence: TokenSequence, limits: Limits) -> None:
    if sequence.input_tokens > limits.max_tokens:
        raise SampleUnusable(sequence.key, f"{sequence.input_tokens} tokens, the trainer takes {limits.max_tokens}")
    lowest = min(min(sequence.prompt_ids), min(sequence.response_ids))
    highest = max(max(sequence.prompt_ids), max(sequence.response_ids))
    if lowest < 0 or highest >= limits.vocab_size:
        raise SampleUnusable(sequence.key, f"token ids {lowest} to {highest}, the vocabulary has {limits.vocab_size}")


def collate(
    sequences: Sequence[TokenSequence] | Mapping[int, TokenSequence],
    members: Sequence[int],
    *,
    share_prefixes: bool = True,
) -> Packed:
    """Some of the sequences, by their numbers, as one micro-batch on the CPU."""
    documents = [sequences[member].input_ids() for member in members]
    tree = grow(documents, share=share_prefixes)
    tokens: list[int] = []
    positions: list[int] = []
    begins: list[int] = []
    for branch in tree.branches:
        begins.append(len(tokens))
        tokens.extend(documents[branch.document][branch.start : branch.end])
        positions.extend(range(branch.start, branch.end))
    rows: list[int] = []
    targets: list[int] = []
    for document, member in enumerate(members):
        sequence = sequences[member]
        first = len(sequence.prompt_ids) - 1
        for index, start, end in tree.pieces(document, sequence.input_tokens):
            shift = begins[index] - tree.branches[index].start
            rows.extend(range(max(start, first) + shift, end + shift))
        targets.extend(sequence.response_ids)
    return Packed(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        tree.layout(),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        tuple(len(sequences[member].response_ids) for member in members),
        tuple(sequences[member].temperature for member in members),
        tuple(members),
    )


def filler() -> Packed:
    """One token of no sample, for a rank with nothing left: every rank must run as many forwards.

    Its one position is read and its loss multiplied by zero.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    return Packed(zero, zero, Layout((1,), (1,), ((0,),)), zero, zero, (1,), (1.0,), ())
