"""Prefix trees: each distinct prefix once, every document complete along its branches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.training import packing
from clawloop.training.packing import CommonPrefixes, PrefixIndex, PrefixTree, build_prefix_tree

# Two ids only, so that beginnings are shared often and at every depth; some documents equal or inside others.
forests = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def every_shared_token_counts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SHARED_TOKENS", 1)
        yield


def laid_out(tree: PrefixTree, documents: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(documents[b.document][b.start : b.end] for b in tree.branches))


@given(forests)
def test_a_tree_has_each_distinct_prefix_once(documents: list[list[int]]) -> None:
    distinct = {tuple(ids[:end]) for ids in documents for end in range(1, len(ids) + 1)}
    assert build_prefix_tree(documents).tokens == len(distinct)


@given(forests)
def test_the_spans_of_a_document_are_the_whole_document(documents: list[list[int]]) -> None:
    tree = build_prefix_tree(documents)
    for document, ids in enumerate(documents):
        pieces = tree.spans(document, len(ids))
        found = [documents[tree.branches[b].document][start:end] for b, start, end in pieces]
        assert list(chain.from_iterable(found)) == ids
        assert all(tree.branches[b].start <= start < end <= tree.branches[b].end for b, start, end in pieces)


@given(forests)
def test_a_branch_attends_to_its_documents_tokens_and_no_others(documents: list[list[int]]) -> None:
    tree = build_prefix_tree(documents)
    tokens, layout = laid_out(tree, documents), tree.layout()
    assert sum(layout.lengths) == sum(layout.segments) == len(tokens)
    starts = [sum(layout.segments[:index]) for index in range(len(layout.segments))]
    begin = 0
    for branch, length, reads in zip(tree.branches, layout.lengths, layout.attends_to, strict=True):
        read = [place for s in reads for place in range(starts[s], starts[s] + layout.segments[s])]
        assert [tokens[place] for place in read] == documents[branch.document][: branch.end]
        assert read[len(read) - length :] == list(range(begin, begin + length))
        begin += length


@given(forests)
def test_without_sharing_every_document_has_its_own_branch(documents: list[list[int]]) -> None:
    tree = build_prefix_tree(documents, share=False)
    assert laid_out(tree, documents) == list(chain.from_iterable(documents))
    assert tree.layout().attends_to == tuple((index,) for index in range(len(documents)))


@given(forests)
def test_the_unshared_tokens_of_a_document_are_what_the_tree_grows_by(documents: list[list[int]]) -> None:
    overlaps = CommonPrefixes(documents)
    gathered = PrefixIndex(overlaps)
    placed: list[int] = []
    added = 0
    for document in overlaps.packing_order():
        added += len(documents[document]) - gathered.longest_shared(document)[0]
        gathered.add(document)
        placed.append(document)
        assert added == build_prefix_tree([documents[index] for index in placed]).tokens
    assert sorted(placed) == list(range(len(documents)))


@given(forests, st.randoms(use_true_random=False))
def test_the_longest_shared_prefix_is_that_of_pairwise_comparison(documents: list[list[int]], rng: Random) -> None:
    order = list(range(len(documents)))
    rng.shuffle(order)
    gathered = PrefixIndex(CommonPrefixes(documents))
    for place, document in enumerate(order):
        beginnings = [
            [one == other for one, other in zip(documents[document], documents[earlier], strict=False)]
            for earlier in order[:place]
        ]
        most = max(([*same, False].index(False) for same in beginnings), default=0)
        common, other = gathered.longest_shared(document)
        assert common == most
        assert (other is None) == (most == 0)
        assert other is None or documents[other][:common] == documents[document][:common]
        gathered.add(document)


def test_a_short_prefix_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED_TOKENS", 3)
    assert build_prefix_tree([[1, 2, 3], [1, 2, 4]]).layout().attends_to == ((0,), (1,))
    assert build_prefix_tree([[1, 2, 3, 4], [1, 2, 3, 5]]).layout().attends_to == ((0, 1), (0, 2))
    assert build_prefix_tree([[1, 2, 3], [1, 2]]).layout() == build_prefix_tree([[1, 2, 3]]).layout(), (
        "wholly inside costs nothing"
    )


def test_the_longest_document_is_one_branch_wherever_it_stands() -> None:
    turns = [[1, 1, 7], [1, 1, 2, 2, 7], [1, 1, 2, 2, 3, 3, 7]]
    assert [(b.start, b.parent) for b in build_prefix_tree(turns).branches] == [(2, 2), (4, 2), (0, None)]


def test_documents_with_a_common_prefix_are_adjacent_the_longest_group_first() -> None:
    documents = [[1, 5], [2, 2, 2, 2], [1, 1, 1, 1, 1], [3], [2, 2], [1, 1, 1, 2]]
    assert list(CommonPrefixes(documents).packing_order()) == [2, 5, 0, 4, 1, 3]
    assert list(CommonPrefixes(documents, share=False).packing_order()) == [2, 1, 5, 0, 4, 3]
