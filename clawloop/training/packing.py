"""Micro-batches: token sequences packed under a budget, without padding, shared prefixes computed once."""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from clawloop.core.errors import SampleUnusable

# Sequences ------------------------------------------------------------------------------------------------------------
# Token sequences of samples, and the limits on what the trainer packs into a micro-batch.


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and the response sampled after it.

    Args:
        key: names the sequence in errors, e.g. the sample's id.
        prompt_ids: at least one.
        response_ids: at least one.
        temperature: recorded when sampling, > 0; logits are divided by it.

    Raises:
        SampleUnusable: no prompt, no response, or a temperature that is not finite and above 0.
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
        """Number of tokens the model takes as input: all but the last response token, which is only predicted."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    def input_ids(self) -> list[int]:
        """The tokens the model takes as input."""
        return [*self.prompt_ids, *self.response_ids[:-1]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of samples and micro-batches.

    Args:
        budget_tokens: input tokens of one micro-batch, a shared prefix counted once. A longer sample gets a micro-batch
            of its own, which samples that share most of their tokens with it may join, see `capacity`.
        max_tokens: input tokens of one sample, bounded by the model's positions or the memory.
        vocab_size: ids at or above it raise (on a GPU they would end the process).
        share_prefixes: compute a shared prefix once; False to measure what that saves.
    """

    budget_tokens: int
    max_tokens: int
    vocab_size: int
    share_prefixes: bool = True

    def capacity(self, longest: int | None) -> int:
        """Maximum tokens of a micro-batch after one more sample joins it.

        The prompts of one chat may each fill the budget and differ in their last few hundred tokens only. Under the
        plain budget each would be computed alone, from its first token on, so such samples may exceed it by half.

        Args:
            longest: length of the longest sample in the micro-batch, this one included, that shares most of its tokens
                with this one; None if none does.
        """
        if longest is None:
            return self.budget_tokens
        return max(self.budget_tokens, longest + self.budget_tokens // 2)


# Prefixes -------------------------------------------------------------------------------------------------------------
# Common prefixes of documents, laid out so that each prefix is computed once.
#
# A token's hidden state depends only on the tokens before it, so documents with the same prefix share the states of
# that prefix. Only equal token ids count: a turn's prompt need not contain an earlier turn's response, and mostly does
# not.

MIN_SHARED_TOKENS = 32
"""Shorter common prefixes are not shared: chat templates begin all prompts alike, and a branch costs more than that."""


class AttentionLayout(NamedTuple):
    """Branches concatenated to S tokens, and the segments each branch attends to.

    A tuple of integers, passed through the model's layers in place of an attention mask.

    Args:
        lengths: tokens of each branch; they add up to S.
        segments: lengths of the same S tokens, cut at branch ends and wherever a branch leaves another.
        attends_to: for each branch, indices of the segments from its document's first token to the branch's last
            token, in order. The branch's own tokens come last, and attention among them is causal.
    """

    lengths: tuple[int, ...]
    segments: tuple[int, ...]
    attends_to: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The tokens of one document that it does not share with an earlier branch.

    Args:
        document: index of the document.
        start, end: its positions in the branch, `end` exclusive.
        parent: index of the branch that holds position `start` − 1; None if `start` is 0.
    """

    document: int
    start: int
    end: int
    parent: int | None

    def __len__(self) -> int:
        return self.end - self.start


class CommonPrefixes:
    """Lengths of the common prefixes of any two of the given documents.

    Args:
        documents: token ids, at least one each.
        share: False treats them as having no common prefix.

    Attributes:
        rank: each document's position in lexicographic order.
    """

    def __init__(self, documents: Sequence[Sequence[int]], *, share: bool = True):
        self._documents = documents
        self._share = share
        # In lexicographic order a document's neighbours share the longest prefix with it, and the common prefix of any
        # two is the minimum over adjacent pairs between them.
        ordered = sorted(range(len(documents)), key=lambda document: list(documents[document]))
        self.rank = {document: rank for rank, document in enumerate(ordered)}
        adjacent = [_common(documents[one], documents[other]) if share else 0 for one, other in pairwise(ordered)]
        # A sparse table: level k has the minimum of each 2^k in a row, so any range's minimum takes two look-ups.
        self._minima = [adjacent]
        while (width := 1 << len(self._minima)) <= len(adjacent):
            below = self._minima[-1]
            self._minima.append([min(pair) for pair in zip(below, below[width // 2 :], strict=False)])

    def packing_order(self) -> Iterator[int]:
        """The documents with those that share a prefix next to each other; the group with the longest document first.

        If nothing is shared: longest first, equal lengths in the given order.
        """
        groups: dict[object, list[int]] = {}
        for document, ids in enumerate(self._documents):
            groups.setdefault(tuple(ids[:MIN_SHARED_TOKENS]) if self._share else document, []).append(document)
        for group in sorted(groups.values(), key=lambda group: -max(map(self._length, group))):
            yield from sorted(group, key=self.rank.__getitem__)

    def common(self, one: int, other: int) -> int:
        """The number of tokens in the common prefix of two documents."""
        first, last = sorted((self.rank[one], self.rank[other]))
        level = (last - first).bit_length() - 1
        return min(self._minima[level][first], self._minima[level][last - (1 << level)])

    def is_worth_sharing(self, document: int, common: int) -> bool:
        """True if a document's prefix of `common` tokens, shared with another document, is computed only once."""
        # A document that is a prefix of another needs no branch, however short it is.
        return common >= MIN_SHARED_TOKENS or common == len(self._documents[document])

    def _length(self, document: int) -> int:
        return len(self._documents[document])


class PrefixIndex:
    """A growing set of documents, queried for the longest prefix that another document shares with one of them."""

    def __init__(self, prefixes: CommonPrefixes):
        self._prefixes = prefixes
        self._ordered: list[int] = []

    def add(self, document: int) -> None:
        insort(self._ordered, document, key=self._prefixes.rank.__getitem__)

    def longest_shared(self, document: int) -> tuple[int, int | None]:
        """The tokens a document shares with one of the set, and which one; (0, None) if not worth sharing."""
        at = bisect(self._ordered, self._prefixes.rank[document], key=self._prefixes.rank.__getitem__)
        adjacent = self._ordered[max(0, at - 1) : at + 1]
        common, other = max(((self._prefixes.common(document, one), one) for one in adjacent), default=(0, None))
        return (common, other) if common and self._prefixes.is_worth_sharing(document, common) else (0, None)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Documents and the branches their tokens are in.

    Args:
        branches: in order of their documents; a document that is a prefix of another has none.
        ends: for each document, the branch that holds its last token.
    """

    branches: tuple[Branch, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.branches))

    def spans(self, document: int, length: int) -> list[tuple[int, int, int]]:
        """The places of a document's first `length` tokens: (branch, start position, end position), in order."""
        spans = []
        branch: int | None = self.ends[document]
        end = length
        while branch is not None:
            start = self.branches[branch].start
            spans.append((branch, start, end))
            branch, end = self.branches[branch].parent, start
        return spans[::-1]

    def layout(self) -> AttentionLayout:
        """The layout of the branches, concatenated in order."""
        cuts: list[set[int]] = [{branch.start, branch.end} for branch in self.branches]
        for branch in self.branches:
            if branch.parent is not None:
                cuts[branch.parent].add(branch.start)
        segments: list[int] = []
        segment_at: list[dict[int, int]] = []  # of each branch: start position → segment
        for positions in map(sorted, cuts):
            segment_at.append({})
            for start, end in pairwise(positions):
                segment_at[-1][start] = len(segments)
                segments.append(end - start)
        attends_to = []
        for branch in self.branches:
            spans = self.spans(branch.document, branch.end)
            attends_to.append(tuple(s for b, _, end in spans for at, s in segment_at[b].items() if at < end))
        return AttentionLayout(tuple(map(len, self.branches)), tuple(segments), tuple(attends_to))


def build_prefix_tree(documents: Sequence[Sequence[int]], *, share: bool = True) -> PrefixTree:
    """The prefix tree of documents of at least one token each.

    Args:
        documents: token ids.
        share: False gives every document a branch of its own.
    """
    index = PrefixIndex(CommonPrefixes(documents, share=share))
    placed: dict[int, tuple[int, int | None]] = {}  # document with a branch → its start, the document it leaves
    prefix_of: dict[int, int] = {}  # document without a branch → the document it is a prefix of
    # Longest first: the longest needs no mask, and a document comes after those it may be a prefix of.
    for document in sorted(range(len(documents)), key=lambda document: -len(documents[document])):
        start, other = index.longest_shared(document)
        if other is not None and start == len(documents[document]):
            prefix_of[document] = other
        else:
            placed[document] = (start, other)
            index.add(document)
    branch_of = {document: branch for branch, document in enumerate(sorted(placed))}

    def branch_at(position: int, document: int) -> int:
        start, other = placed[document]
        while position < start and other is not None:
            document = other
            start, other = placed[document]
        return branch_of[document]

    branches = []
    for document in branch_of:
        start, other = placed[document]
        parent = None if other is None else branch_at(start - 1, other)
        branches.append(Branch(document, start, len(documents[document]), parent))
    ends = [
        branch_of[document] if document in branch_of else branch_at(len(ids) - 1, prefix_of[document])
        for document, ids in enumerate(documents)
    ]
    return PrefixTree(tuple(branches), tuple(ends))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


# Plans ----------------------------------------------------------------------------------------------------------------
# Packing of samples into micro-batches under a token budget.
#
# No sample is cut and none is padded: one that does not fit raises. Samples with a common prefix go together.


class _Bin:
    """A micro-batch being filled.

    A chat is a set of samples of which each shares more than half of its tokens with an earlier one.

    Attributes:
        chats: sample → the first sample of its chat.
        tokens: input tokens, shared prefixes counted once.
    """

    def __init__(self, prefixes: CommonPrefixes):
        self.chats: dict[int, int] = {}
        self.tokens = 0
        self._index = PrefixIndex(prefixes)
        self._longest: dict[int, int] = {}  # chat → length of its longest sample

    def cost(self, sample: int, length: int) -> tuple[int, int | None]:
        """The tokens that a sample would add, and the `longest` that `Limits.capacity` takes."""
        shared, chat = self._shared(sample, length)
        return length - shared, None if chat is None else max(length, self._longest[chat])

    def add(self, sample: int, length: int) -> None:
        shared, chat = self._shared(sample, length)
        self.tokens += length - shared
        self.chats[sample] = chat = sample if chat is None else chat
        self._longest[chat] = max(length, self._longest.get(chat, 0))
        self._index.add(sample)

    def _shared(self, sample: int, length: int) -> tuple[int, int | None]:
        """The tokens of a sample that are in the bin already, and the chat that has most of its tokens, if any."""
        shared, other = self._index.longest_shared(sample)
        return shared, None if other is None or 2 * shared < length else self.chats[other]


def plan_micro_batches(
    sequences: Sequence[TokenSequence], limits: Limits, together: Sequence[tuple[int, ...]] = ()
) -> tuple[tuple[int, ...], ...]:
    """Assigns samples to micro-batches: those with a common prefix together, then first fit, longest first.

    Args:
        together: indices of sequences that have to be in one micro-batch, also where it exceeds the budget.

    Returns:
        For each micro-batch, indices of `sequences`; each index exactly once. Deterministic, so equal on every rank.

    Raises:
        SampleUnusable: a sample is too long, or has an id outside the vocabulary.
    """
    for sequence in sequences:
        check_limits(sequence, limits)
    prefixes = CommonPrefixes([sequence.input_ids() for sequence in sequences], share=limits.share_prefixes)
    followers = {first: others for first, *others in together}
    placed_with = {other for others in followers.values() for other in others}
    bins: list[_Bin] = []
    for sample in prefixes.packing_order():
        if sample in placed_with:
            continue
        length = sequences[sample].input_tokens
        added = sum(_added_tokens(prefixes, sequences, sample, other) for other in followers.get(sample, ()))
        fitting: list[tuple[int, int]] = []
        for number, candidate in enumerate(bins):
            cost, longest = candidate.cost(sample, length)
            if candidate.tokens + cost + added <= limits.capacity(longest):
                fitting.append((cost, number))
        _, chosen = min(fitting, default=(length, len(bins)))
        if chosen == len(bins):
            bins.append(_Bin(prefixes))
        for member in (sample, *followers.get(sample, ())):
            bins[chosen].add(member, sequences[member].input_tokens)
    return tuple(tuple(sorted(filled.chats)) for filled in bins)


def _added_tokens(prefixes: CommonPrefixes, sequences: Sequence[TokenSequence], sample: int, other: int) -> int:
    """The tokens that `other` adds to a micro-batch which holds `sample`."""
    common = prefixes.common(sample, other)
    return sequences[other].input_tokens - (common if prefixes.is_worth_sharing(other, common) else 0)


def check_limits(sequence: TokenSequence, limits: Limits) -> None:
    """Raise SampleUnusable if a sample is too long, or has an id outside the vocabulary."""
    if sequence.input_tokens > limits.max_tokens:
        raise SampleUnusable(sequence.key, f"{sequence.input_tokens} tokens, the trainer takes {limits.max_tokens}")
    lowest = min(min(sequence.prompt_ids), min(sequence.response_ids))
    highest = max(max(sequence.prompt_ids), max(sequence.response_ids))
    if lowest < 0 or highest >= limits.vocab_size:
        raise SampleUnusable(sequence.key, f"token ids {lowest} to {highest}, the vocabulary has {limits.vocab_size}")


# Micro-batches --------------------------------------------------------------------------------------------------------
# Micro-batches: token sequences of unequal length, concatenated without padding, shared prefixes computed once.
#
# The only tokens that belong to no sample are those of `filler()`. Dimension suffixes: `_S` tokens of the micro-batch,
# `_N` response positions.


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
