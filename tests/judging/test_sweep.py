"""The sweep: what was not announced is announced in order; what was left open is woken."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from activities import notify, sweep
from activities.notify import TrainingNotifier
from activities.sweep import SweepActivities
from clawloop.core.contracts.notices import BatchWaits, Notice, SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven, TurnRecorded
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import SessionId
from db.sweep import PostgresSweepStore
from db.temporal_server import TemporalServerStore
from tests.fakes.notifier import FakeNotifier
from tests.judging.conftest import Bench

IDLE = timedelta(minutes=30)


def sweeper(bench: Bench, notifier: FakeNotifier, age: timedelta = timedelta(0)) -> SweepActivities:
    return SweepActivities(PostgresSweepStore(bench.database), notifier, bench.work, IDLE, age)


async def test_missed_main_turns_are_announced_in_order_once(bench: Bench) -> None:
    one = bench.conversation("a", "b", "c", session="one")
    two = bench.conversation("x", "y", session="two")
    await bench.insert(one[0], two[0], one[1], *bench.conversation("s", session="three", kind=TurnKind.SIDE))
    await bench.insert(one[2], two[1])
    notifier = FakeNotifier()
    assert (await sweeper(bench, notifier).sweep()).turns == 5
    told = [message.turn_id for _, message in notifier.sent if isinstance(message, TurnRecorded)]
    for turns in (one, two):
        ids = [turn.turn_id for turn in turns]
        assert [turn_id for turn_id in told if turn_id in ids] == ids
    assert (await sweeper(bench, notifier).sweep()).turns == 0


async def test_young_turns_are_left_to_the_gateway(bench: Bench) -> None:
    await bench.insert(*bench.conversation("a"))
    swept = await sweeper(bench, FakeNotifier(), timedelta(minutes=1)).sweep()
    assert swept.turns == 0


async def test_while_workflows_cannot_be_told_nothing_is_noted(bench: Bench) -> None:
    await bench.insert(*bench.conversation("a"))
    away = FakeNotifier()
    away.available = False
    swept = await sweeper(bench, away).sweep()
    assert (swept.turns, swept.stuck) == (0, 1)
    assert (await sweeper(bench, FakeNotifier()).sweep()).turns == 1


async def test_what_a_temporal_server_took_before_it_was_lost_is_sent_to_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.insert(*bench.conversation("a"))
    servers, notifier = TemporalServerStore(bench.database), FakeNotifier()
    await servers.hold("lost")
    notify = notifier.notify

    async def loses_its_data(notice: SessionNotice) -> None:
        await notify(notice)
        await servers.hold("next", formerly="lost")

    monkeypatch.setattr(notifier, "notify", loses_its_data)
    assert (await sweeper(bench, notifier).sweep()).turns == 1
    assert (await sweeper(bench, FakeNotifier()).sweep()).turns == 1


class Stubborn(FakeNotifier):
    """Cannot tell some sessions.

    Attributes:
        stuck: these, by where they are in their order.
    """

    def __init__(self, stuck: set[SessionId]) -> None:
        super().__init__()
        self.stuck = stuck

    async def notify(self, notice: Notice) -> None:
        self.available = isinstance(notice, SessionNotice) and notice.session.session_id not in self.stuck
        await super().notify(notice)


async def test_a_session_that_cannot_be_told_keeps_nobody_from_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH", 2)
    stuck = bench.conversation("a", "b", "c", session="stuck")
    first = await bench.insert(*stuck)
    others = [bench.conversation("x", session=f"other {n}")[0] for n in range(3)]
    await bench.insert(*others)
    bench.feedback(stuck[0], 1.0)
    bench.feedback(stuck[0], -1.0)
    bench.feedback(others[0], 1.0)
    notifier = Stubborn({first})
    sweeping = SweepActivities(
        PostgresSweepStore(bench.database), notifier, bench.work, IDLE, timedelta(0), counter=bench.metrics
    )
    swept = await sweeping.sweep()
    assert (swept.turns, swept.feedback, swept.stuck) == (3, 1, 1)
    assert bench.counted("swept_total", what="stuck") == 1
    notifier.stuck = set()
    swept = await sweeping.sweep()
    assert (swept.turns, swept.feedback, swept.stuck) == (3, 2, 0)


async def test_where_nearly_nobody_can_be_told_the_sweep_gives_up_and_keeps_what_it_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "MAX_FAILED", 2)
    monkeypatch.setattr(notify, "CONCURRENCY", 1)
    turns = [bench.conversation("x", session=f"{n}")[0] for n in range(6)]
    sessions = [await bench.insert(turn) for turn in turns]
    notifier = Stubborn(set(sessions[1:]))
    with pytest.raises(SignalFailed):
        await sweeper(bench, notifier).sweep()
    assert notifier.calls <= 4  # one that hears, and one more than may be stuck
    notifier.stuck = set()
    assert (await sweeper(bench, notifier).sweep()).turns == 5


class Order:
    """Notes what a sweep notifies, in order. Satisfies `WorkStore` and `Notifier`; `default` has a batch."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def pending_work(self, age: timedelta) -> list[str]:
        return ["default"]

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        assert policies == ["default"]

    async def notify(self, notice: Notice) -> None:
        self.sent.append("work" if isinstance(notice, BatchWaits) else "turn")


async def test_a_long_backlog_of_turns_delays_no_training_and_is_left_to_the_next_sweeps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH", 2)
    monkeypatch.setattr(sweep, "NOTIFY_FOR", timedelta(0))
    await bench.insert(*[bench.conversation("x", session=f"{n}")[0] for n in range(5)])
    order = Order()
    work = TrainingNotifier(order, order)
    sweeping = SweepActivities(PostgresSweepStore(bench.database), order, work, IDLE, timedelta(0))
    assert [(await sweeping.sweep()).turns for _ in range(3)] == [2, 2, 1]
    assert order.sent == ["work", "turn", "turn", "work", "turn", "turn", "work", "turn"]


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
    session = await bench.insert(turn)
    bench.feedback(turn, 1.0)
    bench.execute("UPDATE sessions SET last_turn_at = now() - interval '1 hour'")

    class NoTurns(FakeNotifier):
        async def notify(self, notice: Notice) -> None:
            if isinstance(notice, SessionNotice) and isinstance(notice.message, TurnRecorded):
                raise ValueError("of turns")
            await super().notify(notice)

    notifier, disk = NoTurns(), FullDisk()
    store = PostgresSweepStore(bench.database)
    retention: Any = disk
    sweeping = SweepActivities(store, notifier, bench.work, IDLE, timedelta(0), retention, counter=bench.metrics)
    with pytest.raises(ExceptionGroup) as raised:  # the first failure, not the disk's
        await sweeping.sweep()
    assert raised.group_contains(ValueError, match="of turns")
    assert [facts.session_id for facts, _ in notifier.sent] == [session, session]
    assert [type(message) for _, message in notifier.sent] == [FeedbackGiven, type(None)]
    assert disk.tried == 1
    assert (await sweeper(bench, FakeNotifier()).sweep()).turns == 1  # it is still to be told


async def test_feedback_nobody_was_told_of_is_announced_once(bench: Bench) -> None:
    (turn,) = bench.conversation("a")
    await bench.insert(turn)
    given = bench.feedback(turn, 1.0)
    notifier = FakeNotifier()
    assert (await sweeper(bench, notifier).sweep()).feedback == 1
    assert notifier.sent[-1][1] == FeedbackGiven(given, turn.turn_id)
    assert (await sweeper(bench, notifier).sweep()).feedback == 0
    # Told a day ago and still not taken in: somebody lost it.
    bench.execute("UPDATE feedback SET announced_at = now() - interval '2 days'")
    assert (await sweeper(bench, notifier).sweep()).feedback == 1


async def test_sessions_nobody_closed_are_woken(bench: Bench) -> None:
    session = await bench.insert(*bench.conversation("a"))
    notifier = FakeNotifier()
    assert (await sweeper(bench, notifier).sweep()).sessions == 0
    bench.execute("UPDATE sessions SET last_turn_at = now() - interval '1 hour'")
    assert (await sweeper(bench, notifier).sweep()).sessions == 1
    facts, message = notifier.sent[-1]
    assert (facts.session_id, message) == (session, None)
