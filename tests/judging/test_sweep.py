"""The sweep: what was not announced is announced in order; what was left open is woken."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from activities.upkeep import UpkeepActivities
from clawloop.contracts import FeedbackGiven, SessionFacts, TurnKind, TurnRecorded
from clawloop.errors import AnnouncementFailed
from db.upkeep import PostgresUpkeepStore
from tests.fakes.announcer import FakeAnnouncer
from tests.judging.conftest import Bench

IDLE = timedelta(minutes=30)


def sweeper(bench: Bench, announcer: FakeAnnouncer, age: timedelta = timedelta(0)) -> UpkeepActivities:
    return UpkeepActivities(PostgresUpkeepStore(bench.database), announcer, bench.work, IDLE, age)


async def test_missed_main_turns_are_announced_in_order_once(bench: Bench) -> None:
    one = bench.conversation("a", "b", "c", session="one")
    two = bench.conversation("x", "y", session="two")
    await bench.enter(one[0], two[0], one[1], *bench.conversation("s", session="three", kind=TurnKind.SIDE))
    await bench.enter(one[2], two[1])
    announcer = FakeAnnouncer()
    assert (await sweeper(bench, announcer).sweep()).announced == 5
    told = [message.turn_id for _, message in announcer.told if isinstance(message, TurnRecorded)]
    for turns in (one, two):
        ids = [turn.turn_id for turn in turns]
        assert [turn_id for turn_id in told if turn_id in ids] == ids
    assert (await sweeper(bench, announcer).sweep()).announced == 0


async def test_young_turns_are_left_to_the_gateway(bench: Bench) -> None:
    await bench.enter(*bench.conversation("a"))
    swept = await sweeper(bench, FakeAnnouncer(), timedelta(minutes=1)).sweep()
    assert swept.announced == 0


async def test_while_workflows_cannot_be_told_nothing_is_noted(bench: Bench) -> None:
    await bench.enter(*bench.conversation("a"))
    away = FakeAnnouncer()
    away.available = False
    with pytest.raises(ExceptionGroup) as raised:
        await sweeper(bench, away).sweep()
    assert raised.group_contains(AnnouncementFailed)
    assert (await sweeper(bench, FakeAnnouncer()).sweep()).announced == 1


class FullDisk:
    """A retention that fails.

    Attributes:
        tried: how often.
    """

    tried = 0

    async def remove(self) -> int:
        self.tried += 1
        raise OSError("disk")


async def test_a_part_that_fails_keeps_no_other_from_running(bench: Bench) -> None:
    (turn,) = bench.conversation("a")
    session = await bench.enter(turn)
    bench.feedback(turn, 1.0)
    bench.execute("UPDATE sessions SET last_turn_at = now() - interval '1 hour'")

    class NoTurns(FakeAnnouncer):
        async def announce_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
            raise AnnouncementFailed("of turns")

    announcer, disk = NoTurns(), FullDisk()
    store = PostgresUpkeepStore(bench.database)
    retention: Any = disk
    upkeep = UpkeepActivities(store, announcer, bench.work, IDLE, timedelta(0), retention, bench.metrics)
    with pytest.raises(ExceptionGroup) as raised:  # the first failure, not the disk's
        await upkeep.sweep()
    assert raised.group_contains(AnnouncementFailed, match="of turns")
    assert [facts.session_id for facts, _ in announcer.told] == [session, session]
    assert [type(message) for _, message in announcer.told] == [FeedbackGiven, type(None)]
    assert disk.tried == 1
    assert (await sweeper(bench, FakeAnnouncer()).sweep()).announced == 1  # it is still to be told


async def test_feedback_nobody_was_told_of_is_announced_once(bench: Bench) -> None:
    (turn,) = bench.conversation("a")
    await bench.enter(turn)
    given = bench.feedback(turn, 1.0)
    announcer = FakeAnnouncer()
    assert (await sweeper(bench, announcer).sweep()).feedback == 1
    assert announcer.told[-1][1] == FeedbackGiven(given, turn.turn_id)
    assert (await sweeper(bench, announcer).sweep()).feedback == 0
    # Told a day ago and still not taken in: somebody lost it.
    bench.execute("UPDATE feedback SET announced_at = now() - interval '2 days'")
    assert (await sweeper(bench, announcer).sweep()).feedback == 1


async def test_sessions_nobody_closed_are_woken(bench: Bench) -> None:
    session = await bench.enter(*bench.conversation("a"))
    announcer = FakeAnnouncer()
    assert (await sweeper(bench, announcer).sweep()).woken == 0
    bench.execute("UPDATE sessions SET last_turn_at = now() - interval '1 hour'")
    assert (await sweeper(bench, announcer).sweep()).woken == 1
    facts, message = announcer.told[-1]
    assert (facts.session_id, message) == (session, None)
