"""Common beginnings: each distinct one once, every document whole along its branches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.training.packing import prefix_tree
from clawloop.training.packing.prefix_tree import Gathered, Overlaps, PrefixTree, grow

# Two ids only, so that beginnings are shared often and at every depth; some documents equal or inside others.
forests = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def every_shared_token_counts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "SHARED_AT_LEAST", 1)
        yield


def laid_out(tree: PrefixTree, documents: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(documents[b.document][b.start : b.end] for b in tree.branches))


@given(forests)
def test_a_tree_reads_each_distinct_beginning_once(documents: list[list[int]]) -> None:
    distinct = {tuple(ids[:end]) for ids in documents for end in range(1, len(ids) + 1)}
    assert grow(documents).tokens == len(distinct)


@given(forests)
def test_a_document_is_whole_along_its_branches(documents: list[list[int]]) -> None:
    tree = grow(documents)
    for document, ids in enumerate(documents):
        pieces = tree.pieces(document, len(ids))
        found = [documents[tree.branches[b].document][start:end] for b, start, end in pieces]
        assert list(chain.from_iterable(found)) == ids
        assert all(tree.branches[b].start <= start < end <= tree.branches[b].end for b, start, end in pieces)


@given(forests)
def test_a_branch_attends_to_its_documents_tokens_and_no_others(documents: list[list[int]]) -> None:
    tree = grow(documents)
    tokens, layout = laid_out(tree, documents), tree.layout()
    assert sum(layout.lengths) == sum(layout.segments) == len(tokens)
    starts = [sum(layout.segments[:index]) for index in range(len(layout.segments))]
    begin = 0
    for branch, length, reads in zip(tree.branches, layout.lengths, layout.reads, strict=True):
        read = [place for s in reads for place in range(starts[s], starts[s] + layout.segments[s])]
        assert [tokens[place] for place in read] == documents[branch.document][: branch.end]
        assert read[len(read) - length :] == list(range(begin, begin + length))
        begin += length


@given(forests)
def test_without_sharing_every_document_has_a_branch_of_its_own(documents: list[list[int]]) -> None:
    tree = grow(documents, share=False)
    assert laid_out(tree, documents) == list(chain.from_iterable(documents))
    assert tree.layout().reads == tuple((index,) for index in range(len(documents)))


@given(forests)
def test_what_a_document_adds_is_what_the_tree_grows_by(documents: list[list[int]]) -> None:
    overlaps = Overlaps(documents)
    gathered = Gathered(overlaps)
    placed: list[int] = []
    added = 0
    for document in overlaps.neighbours():
        added += len(documents[document]) - gathered.shared(document)[0]
        gathered.add(document)
        placed.append(document)
        assert added == grow([documents[index] for index in placed]).tokens
    assert sorted(placed) == list(range(len(documents)))


@given(forests, st.randoms(use_true_random=False))
def test_what_is_found_in_common_is_what_comparing_with_each_finds(documents: list[list[int]], rng: Random) -> None:
    order = list(range(len(documents)))
    rng.shuffle(order)
    gathered = Gathered(Overlaps(documents))
    for place, document in enumerate(order):
        beginnings = [
            [one == other for one, other in zip(documents[document], documents[earlier], strict=False)]
            for earlier in order[:place]
        ]
        most = max(([*same, False].index(False) for same in beginnings), default=0)
        common, other = gathered.shared(document)
        assert common == most
        assert (other is None) == (most == 0)
        assert other is None or documents[other][:common] == documents[document][:common]
        gathered.add(document)


def test_a_beginning_too_short_to_pay_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "SHARED_AT_LEAST", 3)
    assert grow([[1, 2, 3], [1, 2, 4]]).layout().reads == ((0,), (1,))
    assert grow([[1, 2, 3, 4], [1, 2, 3, 5]]).layout().reads == ((0, 1), (0, 2))
    assert grow([[1, 2, 3], [1, 2]]).layout() == grow([[1, 2, 3]]).layout(), "wholly inside costs nothing"


def test_the_longest_document_is_read_in_one_piece_wherever_it_stands() -> None:
    turns = [[1, 1, 7], [1, 1, 2, 2, 7], [1, 1, 2, 2, 3, 3, 7]]
    assert [(b.start, b.parent) for b in grow(turns).branches] == [(2, 2), (4, 2), (0, None)]


def test_families_stand_together_the_longest_first() -> None:
    documents = [[1, 5], [2, 2, 2, 2], [1, 1, 1, 1, 1], [3], [2, 2], [1, 1, 1, 2]]
    assert list(Overlaps(documents).neighbours()) == [2, 5, 0, 4, 1, 3]
    assert list(Overlaps(documents, share=False).neighbours()) == [2, 1, 5, 0, 4, 3]
