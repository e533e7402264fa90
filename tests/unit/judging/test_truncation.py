import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.judging.evidence import MARK_ROOM, SMALLEST_TOTAL, Budgets, cut_middle, share


@given(st.text(max_size=300), st.integers(0, 300))
def test_a_cut_text_never_exceeds_its_limit_and_a_short_one_is_whole(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    assert len(cut) <= limit or cut == text == ""
    if len(text) <= limit:
        assert cut == text


@given(st.text(min_size=200, max_size=400), st.integers(MARK_ROOM + 2, 199))
def test_a_cut_text_keeps_its_beginning_and_end_and_the_number_of_cut_characters(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    room = limit - MARK_ROOM
    assert f"\n[... {len(text) - room} characters cut ...]\n" in cut
    assert cut.startswith(text[: room // 2])
    assert cut.endswith(text[-(room // 2) :])


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 5000))
def test_a_shared_budget_is_never_exceeded_and_only_wasted_when_all_are_satisfied(
    lengths: list[int], budget: int
) -> None:
    shares = share(lengths, budget)
    assert sum(shares) <= budget
    assert all(got <= wanted for got, wanted in zip(shares, lengths, strict=True))
    if sum(lengths) <= budget:
        assert shares == lengths
    else:
        assert sum(shares) == budget


def test_short_texts_are_kept_whole_and_long_ones_share_the_rest() -> None:
    assert share([10, 1000, 1000], 110) == [10, 50, 50]


def test_section_budgets_add_up_to_the_total() -> None:
    assert Budgets().total == 24_000
    assert Budgets.of(24_000) == Budgets()
    for total in (SMALLEST_TOTAL, 1_000, 3_333, 100_000):
        assert total - 5 < Budgets.of(total).total <= total


def test_a_total_without_room_for_the_sections_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 600 characters"):
        Budgets.of(SMALLEST_TOTAL - 1)
