"""What documents have in common from their first token on, laid out so that each common part is read once.

Knows token ids only, neither samples nor tensors. A token's hidden state depends on the tokens before it and on
nothing else, so documents with the same beginning share the states of that beginning. Only equal ids count: a
turn's prompt need not contain an earlier turn's response, and mostly does not.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

SHARED_AT_LEAST = 32
"""Tokens. Chat templates begin all prompts alike; so little saves less than a branch of its own costs."""


class Layout(NamedTuple):
    """Branches laid end to end, S tokens, and what each attends to.

    A tuple of numbers, so that it goes through a model's layers as a mask would.

    Args:
        lengths: tokens of each branch; they add up to S.
        segments: the same S tokens, also cut wherever a branch leaves another.
        reads: of each branch, the segments from its document's first token to its own last one, in order. Its
            own tokens are the last of them, and each sees what stands before it there.
    """

    lengths: tuple[int, ...]
    segments: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The tokens of one document that no other branch has.

    Args:
        document: whose they are.
        start, end: which of its positions.
        parent: index of the branch that holds position `start` − 1; None if `start` is 0.
    """

    document: int
    start: int
    end: int
    parent: int | None

    def __len__(self) -> int:
        return self.end - self.start


class Overlaps:
    """How many tokens any two of some documents have in common from the first one on.

    Args:
        documents: token ids, at least one each.
        share: False takes them as having nothing in common.

    Attributes:
        place: where each document stands when they are sorted.
    """

    def __init__(self, documents: Sequence[Sequence[int]], *, share: bool = True):
        self._documents = documents
        self._share = share
        # Sorted, a document's neighbours have the most in common with it, and of any two the least common
        # beginning on the way from one to the other is what both have.
        in_order = sorted(range(len(documents)), key=lambda document: list(documents[document]))
        self.place = {document: place for place, document in enumerate(in_order)}
        with_next = [_common(documents[one], documents[other]) if share else 0 for one, other in pairwise(in_order)]
        # Level k has the least of each 2^k in a row, so that the least of any stretch is that of two.
        self._least = [with_next]
        while (width := 1 << len(self._least)) <= len(with_next):
            below = self._least[-1]
            self._least.append([min(pair) for pair in zip(below, below[width // 2 :], strict=False)])

    def neighbours(self) -> Iterator[int]:
        """The documents in an order in which those that share stand together; the longest family first.

        Without anything shared: longest first, equal lengths in the given order.
        """
        families: dict[object, list[int]] = {}
        for document, ids in enumerate(self._documents):
            families.setdefault(tuple(ids[:SHARED_AT_LEAST]) if self._share else document, []).append(document)
        for family in sorted(families.values(), key=lambda family: -max(map(self._length, family))):
            yield from sorted(family, key=self.place.__getitem__)

    def common(self, one: int, other: int) -> int:
        """How many tokens these two have in common."""
        first, last = sorted((self.place[one], self.place[other]))
        level = (last - first).bit_length() - 1
        return min(self._least[level][first], self._least[level][last - (1 << level)])

    def pays(self, document: int, common: int) -> bool:
        """Whether so much of a document is to be read with another's."""
        # A document that is wholly inside another needs no branch, however short it is.
        return common >= SHARED_AT_LEAST or common == len(self._documents[document])

    def _length(self, document: int) -> int:
        return len(self._documents[document])


class Gathered:
    """Some of the documents, which one more may join."""

    def __init__(self, overlaps: Overlaps):
        self._overlaps = overlaps
        self._in_order: list[int] = []

    def add(self, document: int) -> None:
        insort(self._in_order, document, key=self._overlaps.place.__getitem__)

    def shared(self, document: int) -> tuple[int, int | None]:
        """How many tokens of one more are read with another's, and whose; (0, None) if it does not pay."""
        at = bisect(self._in_order, self._overlaps.place[document], key=self._overlaps.place.__getitem__)
        beside = self._in_order[max(0, at - 1) : at + 1]
        common, other = max(((self._overlaps.common(document, one), one) for one in beside), default=(0, None))
        return (common, other) if common and self._overlaps.pays(document, common) else (0, None)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Documents and the branches they are read from.

    Args:
        branches: in order of their documents; a document that is the beginning of another has none.
        ends: of each document, the branch that holds its last token.
    """

    branches: tuple[Branch, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.branches))

    def pieces(self, document: int, length: int) -> list[tuple[int, int, int]]:
        """Where a document's tokens are: (branch, first position, position after the last), from the first on."""
        pieces = []
        branch: int | None = self.ends[document]
        end = length
        while branch is not None:
            start = self.branches[branch].start
            pieces.append((branch, start, end))
            branch, end = self.branches[branch].parent, start
        return pieces[::-1]

    def layout(self) -> Layout:
        """The branches end to end in their order."""
        cuts: list[set[int]] = [{branch.start, branch.end} for branch in self.branches]
        for branch in self.branches:
            if branch.parent is not None:
                cuts[branch.parent].add(branch.start)
        segments: list[int] = []
        starting: list[dict[int, int]] = []  # of each branch: position → its segment that begins there
        for places in map(sorted, cuts):
            starting.append({})
            for start, end in pairwise(places):
                starting[-1][start] = len(segments)
                segments.append(end - start)
        reads = []
        for branch in self.branches:
            pieces = self.pieces(branch.document, branch.end)
            reads.append(tuple(s for b, _, end in pieces for at, s in starting[b].items() if at < end))
        return Layout(tuple(map(len, self.branches)), tuple(segments), tuple(reads))


def grow(documents: Sequence[Sequence[int]], *, share: bool = True) -> PrefixTree:
    """The tree of these documents, each of at least one token.

    Args:
        documents: token ids.
        share: False gives every document a branch of its own.
    """
    overlaps = Overlaps(documents, share=share)
    placed: dict[int, tuple[int, int | None]] = {}  # document with a branch → its start, the document it leaves
    gathered = Gathered(overlaps)
    inside: dict[int, int] = {}  # document without → the document it is the beginning of
    # Longest first: the longest needs no mask, and a document comes after those it may be the beginning of.
    for document in sorted(range(len(documents)), key=lambda document: -len(documents[document])):
        start, other = gathered.shared(document)
        if other is not None and start == len(documents[document]):
            inside[document] = other
        else:
            placed[document] = (start, other)
            gathered.add(document)
    index = {document: branch for branch, document in enumerate(sorted(placed))}

    def holding(position: int, document: int) -> int:
        start, other = placed[document]
        while position < start and other is not None:
            document = other
            start, other = placed[document]
        return index[document]

    branches = []
    for document in index:
        start, other = placed[document]
        parent = None if other is None else holding(start - 1, other)
        branches.append(Branch(document, start, len(documents[document]), parent))
    ends = [
        index[document] if document in index else holding(len(ids) - 1, inside[document])
        for document, ids in enumerate(documents)
    ]
    return PrefixTree(tuple(branches), tuple(ends))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
