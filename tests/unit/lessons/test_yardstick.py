"""The rules by which a lesson leaves the prompt and comes back, from the scores of replies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from clawloop.core.contracts.lessons import Finding, LessonState, Yardstick
from clawloop.core.lessons.yardstick import NEEDED, ReplyScores, in_words, read_yardstick, why_grown, why_learned

EFFECTS = [8.0, 12.0, 9.0, 11.0, 10.0, 10.0, 7.0, 13.0]  # mean 10
FIRST = 3


def replies(shares: Mapping[int, float], effects: Sequence[float] = EFFECTS) -> list[ReplyScores]:
    """Replies of which each version lacks this share of the lesson's effect."""
    return [
        ReplyScores(FIRST, -20.0, {FIRST: -20.0 - effect} | {n: -20.0 - share * effect for n, share in shares.items()})
        for effect in effects
    ]


def read(
    shares: Mapping[int, float],
    *,
    state: LessonState = LessonState.ACTIVE,
    since: int = FIRST,
    path: Sequence[int] = range(20),
    practised_in: Collection[int] = range(20),
    effects: Sequence[float] = EFFECTS,
) -> Yardstick:
    return read_yardstick(state, since, replies(shares, effects), path, practised_in)


def test_the_effect_is_a_mean_over_replies_with_its_interval() -> None:
    found = read({})
    assert (found.finding, found.replies, found.version, found.left) == (Finding.HAS_EFFECT, 8, FIRST, ())
    assert found.effect == pytest.approx(10)
    # 2 is the standard deviation of these, and 2.365 · 2 / √8 = 1.672
    assert found.low == pytest.approx(8.328, abs=1e-3)
    assert found.high == pytest.approx(11.672, abs=1e-3)
    assert in_words(found) == "effect 10.0 nats a reply, 8.3 to 11.7 in version 3"


def test_fewer_than_eight_replies_measure_nothing() -> None:
    found = read({4: 0.0, 5: 0.0}, effects=EFFECTS[:7])
    assert found == Yardstick(7, Finding.NOT_MEASURED)
    assert in_words(found) == f"not measured yet: 7 of {NEEDED} replies"
    assert in_words(Yardstick(0, Finding.NOT_MEASURED)) == ""


def test_an_interval_that_is_not_above_0_is_no_effect_whatever_versions_say() -> None:
    found = read({4: 0.0, 5: 0.0}, effects=[5.0, -4.0, 6.0, -3.0, 4.0, -5.0, 3.0, 2.0])
    assert found.finding is Finding.NO_EFFECT
    assert found.effect == pytest.approx(1)
    assert in_words(found).startswith("no measurable effect (1.0 nats a reply, -")


@pytest.mark.parametrize(
    ("shares", "learned"),
    [
        ({4: 0.2, 5: 0.2}, True),
        ({4: 0.9, 5: 0.1, 6: -0.3}, True),
        ({4: 0.1}, False),
        ({4: 0.1, 5: 0.21}, False),
        ({4: 0.1, 5: 0.5, 6: 0.1}, False),
        ({4: 0.1, 5: 0.1, 6: 0.4}, True),
        ({4: 0.1, 5: 0.1, 6: 0.5}, False),
        ({4: 0.1, 5: 0.1, 6: 0.5, 7: 0.1}, False),
    ],
)
def test_a_lesson_is_learned_by_two_versions_in_a_row(shares: dict[int, float], learned: bool) -> None:
    assert (read(shares).finding is Finding.LEARNED) is learned


def test_a_version_that_was_measured_by_too_few_replies_is_not_counted() -> None:
    scored = replies({4: 0.1, 5: 0.1, 6: 0.1})
    few = [ReplyScores(one.first, one.with_lesson, {n: one.without[n] for n in (3, 4)}) for one in scored[:2]]
    found = read_yardstick(LessonState.ACTIVE, FIRST, [*few, *scored[2:]], range(9), range(9))
    assert [one.version for one in found.left] == [4]


def test_replies_of_a_later_measuring_count_only_where_they_show_an_effect() -> None:
    knew = [ReplyScores(5, -20.0, {5: -20.0, 6: -21.0}) for _ in EFFECTS]
    found = read_yardstick(LessonState.ACTIVE, FIRST, [*replies({4: 0.5}), *knew], range(9), range(9))
    [one] = found.left
    assert one.version == 4
    assert one.share == pytest.approx(0.5)


def test_versions_beside_the_path_say_nothing() -> None:
    shares = {4: 0.1, 5: 0.9, 6: 0.1}
    assert read(shares).finding is Finding.HAS_EFFECT
    found = read(shares, path=[6, 4, 3, 0])
    assert found.finding is Finding.LEARNED
    assert why_learned(found) == "learned: versions 4 and 6 lack 10% and 10% of its effect in version 3"


def test_what_versions_said_before_a_lesson_came_back_does_not_send_it_away_again() -> None:
    shares = {4: 0.1, 5: 0.1, 6: 0.1}
    assert read(shares, since=5).finding is Finding.HAS_EFFECT
    assert read(shares | {7: 0.1}, since=5).finding is Finding.LEARNED


def test_a_lesson_is_learned_since_the_first_version_that_no_later_one_forgot() -> None:
    shares = {4: 0.1, 5: 0.15, 6: 0.5, 7: 0.1, 8: 0.0, 9: 0.05, 10: 0.3}
    by = {end - 1: [one.version for one in read(shares, path=range(end)).learned_by] for end in (6, 7, 9, 11)}
    assert by == {5: [4, 5], 6: [], 8: [7, 8], 10: [7, 8]}


def test_three_versions_that_practised_it_and_lack_it_are_told() -> None:
    shares = {4: 0.9, 5: 0.8, 6: 0.7}
    assert read({4: 0.9, 5: 0.8}).finding is Finding.HAS_EFFECT
    assert read(shares, practised_in={4, 6}).finding is Finding.HAS_EFFECT
    found = read(shares)
    assert found.finding is Finding.NOT_LEARNED
    assert in_words(found).endswith("version 6 lacks 70% of it; 3 versions could not learn it: it stays a note")
    # It is measured all the same, and may be learned later.
    assert read(shares | {7: 0.1, 8: 0.1}).finding is Finding.LEARNED


@pytest.mark.parametrize(("share", "finding"), [(0.3, Finding.LEARNED), (0.4, Finding.LEARNED), (0.5, Finding.GROWN)])
def test_a_learned_lesson_that_a_later_version_lacks_has_grown(share: float, finding: Finding) -> None:
    found = read({4: 0.1, 5: 0.1, 6: share}, state=LessonState.LEARNED, since=4)
    assert found.finding is finding
    assert why_grown(found) == f"forgotten: version 6 lacks {share:.0%} of its effect again"
