"""Common prefixes of documents, laid out so that each prefix is computed once.

A token's hidden state depends only on the tokens before it, so documents with the same prefix share the states of that
prefix. Only equal token ids count: a turn's prompt need not contain an earlier turn's response, and mostly does not.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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
