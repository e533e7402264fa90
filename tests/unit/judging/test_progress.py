from datetime import UTC, datetime
from uuid import UUID

import pytest

from clawloop.core.contracts.answers import ReplyFigures
from clawloop.core.ids import SessionId
from clawloop.core.judging.progress import MIN_CHATS, NEWEST_CHATS, Progress, progress_of


def replies(
    version: int, *chats: tuple[int | None, ...], first: int = 0, in_episode: bool = False
) -> list[ReplyFigures]:
    """Chats with these verdicts on their replies."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    sessions = [SessionId(UUID(int=1000 * version + first + place)) for place in range(len(chats))]
    return [
        ReplyFigures(at, session, in_episode, version, verdict, 10)
        for session, verdicts in zip(sessions, chats, strict=True)
        for verdict in verdicts
    ]


def test_too_few_chats_of_either_side_say_nothing() -> None:
    assert progress_of([], []) == Progress(0, 0, None, None)
    enough, fewer = [(1,)] * MIN_CHATS, [(-1,)] * (MIN_CHATS - 1)
    few = progress_of(replies(0, *fewer), replies(1, *enough))
    assert (few.share, few.base_share, few.low, few.is_better) == (1.0, 0.0, None, None)
    assert progress_of(replies(0, *enough), replies(1, *fewer)).low is None


def test_a_change_is_certain_only_beyond_chance() -> None:
    bad, good = [(-1,)] * 8, [(1,)] * 8
    assert progress_of(replies(0, *bad), replies(1, *good)).is_better is True
    assert progress_of(replies(0, *good), replies(2, *bad)).is_better is False
    undecided = progress_of(replies(0, *bad[:4], *good[:4]), replies(1, *good[:5], *bad[:3]))
    assert undecided.is_better is None
    assert undecided.low is not None
    # (5 + 1) / 10 - (4 + 1) / 10, and 1.96 standard errors of the two proportions.
    assert undecided.low == pytest.approx(0.1 - 1.96 * (0.6 * 0.4 / 10 + 0.5 * 0.5 / 10) ** 0.5)


def test_neutral_verdicts_unjudged_replies_and_episodes_do_not_count_and_a_chat_counts_once() -> None:
    base = replies(0, (1, -1, 0, None), (0, None), *[(-1, -1, -1)] * 8)
    newest = [*replies(0, (1,), first=500), *replies(1, *[(1,)] * 8), *replies(1, (-1,), first=50, in_episode=True)]
    found = progress_of(base, newest)
    assert (found.base_chats, found.chats, found.share) == (9, 8, 1.0)
    assert found.base_share == pytest.approx(0.5 / 9)


def test_trained_versions_are_known_by_their_newest_chats() -> None:
    newest = [*replies(1, *[(-1,)] * 30), *replies(2, *[(1,)] * NEWEST_CHATS)]
    found = progress_of(replies(0, *[(-1,)] * 8), newest)
    assert (found.chats, found.share) == (NEWEST_CHATS, 1.0)
