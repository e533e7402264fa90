"""Packing of samples into micro-batches under a token budget.

No sample is cut and none is padded: one that does not fit raises. Samples with a common prefix go together.
"""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.errors import SampleUnusable
from clawloop.training.packing.prefix_tree import CommonPrefixes, PrefixIndex
from clawloop.training.packing.sequences import Limits, TokenSequence


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


def plan_micro_batches(sequences: Sequence[TokenSequence], limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Assigns samples to micro-batches: those with a common prefix together, then first fit, longest first.

    Returns:
        For each micro-batch, indices of `sequences`; each index exactly once. Deterministic, so equal on every rank.

    Raises:
        SampleUnusable: a sample is too long, or has an id outside the vocabulary.
    """
    for sequence in sequences:
        check_limits(sequence, limits)
    prefixes = CommonPrefixes([sequence.input_ids() for sequence in sequences], share=limits.share_prefixes)
    bins: list[_Bin] = []
    for sample in prefixes.packing_order():
        length = sequences[sample].input_tokens
        fitting: list[tuple[int, int]] = []
        for number, candidate in enumerate(bins):
            cost, longest = candidate.cost(sample, length)
            if candidate.tokens + cost <= limits.capacity(longest):
                fitting.append((cost, number))
        _, chosen = min(fitting, default=(length, len(bins)))
        if chosen == len(bins):
            bins.append(_Bin(prefixes))
        bins[chosen].add(sample, length)
    return tuple(tuple(sorted(filled.chats)) for filled in bins)


def check_limits(sequence: TokenSequence, limits: Limits) -> None:
    """Raise SampleUnusable if a sample is too long, or has an id outside the vocabulary."""
    if sequence.input_tokens > limits.max_tokens:
        raise SampleUnusable(sequence.key, f"{sequence.input_tokens} tokens, the trainer takes {limits.max_tokens}")
    lowest = min(min(sequence.prompt_ids), min(sequence.response_ids))
    highest = max(max(sequence.prompt_ids), max(sequence.response_ids))
    if lowest < 0 or highest >= limits.vocab_size:
        raise SampleUnusable(sequence.key, f"token ids {lowest} to {highest}, the vocabulary has {limits.vocab_size}")
