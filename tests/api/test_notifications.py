"""Session workflows are notified of stored turns in the background: chat neither waits for it nor fails with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.recording import notifier as notifier_module
from clawloop.core.contracts.sessions import TurnRecorded
from clawloop.core.ids import turn_id_of
from tests.api.chat_requests import PATH, chat, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier


@asynccontextmanager
async def notifying_gateway(folder: Path, notifier: FakeNotifier) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(folder, engines=[engine], notifier=notifier) as running:
        yield running


class Clock:
    """Replaces the module `time`; the test advances it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_each_main_turn_is_notified_once_with_ids_and_marked(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        replies = [await chat(gateway, session_id="s", session_done=done) for done in (False, True)]
        await chat(gateway, session_id="s", turn_type="side")
        await until(lambda: len(gateway.turns.announced) == 2)
    turns = [turn_id_of(response) for response in replies]
    assert [message for _, message in notifier.sent] == [
        TurnRecorded(turns[0], 0, ends_session=False, opens_session=True),  # type: ignore[arg-type]
        TurnRecorded(turns[1], 0, ends_session=True),  # type: ignore[arg-type]
    ]
    assert len({session.session_id for session, _ in notifier.sent}) == 1
    assert {(session.policy, session.identified_by) for session, _ in notifier.sent} == {("default", "session_id")}


async def test_each_choice_of_a_request_is_notified(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        await chat(gateway, n=3)
        await until(lambda: len(gateway.turns.announced) == 3)


async def test_a_failed_notification_is_left_to_the_sweep_and_later_turns_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(notifier_module, "time", clock)
    notifier = FakeNotifier()
    notifier.available = False
    async with notifying_gateway(tmp_path, notifier) as gateway:
        clock.now = 1.0
        await chat(gateway)
        await until(lambda: notifier.calls == 1)
        clock.now += notifier_module.PAUSE_SECONDS - 0.1
        await chat(gateway)  # within the pause: not even tried
        assert notifier.calls == 1
        notifier.available = True
        clock.now += 0.2
        last = await chat(gateway)
        await until(lambda: gateway.turns.announced)
        assert list(gateway.turns.announced) == [turn_id_of(last)]
        assert len(gateway.turns.records) == 3


async def test_a_spooled_turn_is_notified_once_it_is_stored(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        gateway.turns.available = False
        await chat(gateway)  # spooled
        await asyncio.sleep(0.1)
        assert notifier.sent == []
        gateway.turns.available = True
        await until(lambda: len(gateway.turns.announced) == 1)


@pytest.mark.parametrize("place", ["notifier", "store"])
async def test_a_bug_is_logged_and_the_messages_behind_it_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    notifier, broken = FakeNotifier(), asyncio.Event()

    async def breaks(*_: object) -> None:
        broken.set()
        raise KeyError("a bug")

    async with notifying_gateway(tmp_path, notifier) as gateway:
        with monkeypatch.context() as patched:
            if place == "notifier":
                patched.setattr(notifier, "notify", breaks)
            else:
                patched.setattr(gateway.turns, "mark_notified", breaks)
            await chat(gateway, session_id="one")
            await asyncio.wait_for(broken.wait(), 30)
        last = await chat(gateway, session_id="one")  # in the same queue
        await until(lambda: turn_id_of(last) in gateway.turns.announced)
    [logged] = [record for record in caplog.records if record.name == notifier_module.__name__]
    assert logged.exc_info is not None
    assert logged.exc_info[0] is KeyError
    unsent = gateway.services.metrics.notifications.labels("left to the sweep")
    assert unsent._value.get() == (1 if place == "notifier" else 0)


async def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "QUEUE_LIMIT", 2)
    notifier = FakeNotifier()
    notifier.hangs = True
    async with notifying_gateway(tmp_path, notifier) as gateway:
        for _ in range(6):
            await chat(gateway, session_id="one")
        unsent = gateway.services.metrics.notifications.labels("left to the sweep")
        # One being sent, at most two queued behind it.
        assert unsent._value.get() >= 3
        assert notifier.calls == 1


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_chat_waits_neither_for_a_notification_nor_for_its_failure(tmp_path: Path, hangs: bool) -> None:
    notifier = FakeNotifier()
    notifier.hangs, notifier.available = hangs, False
    async with notifying_gateway(tmp_path, notifier) as gateway, gateway.client() as client:
        for _ in range(3):  # one that waited for a notification that hangs would never be answered
            assert (await client.post(PATH, json=chat_body())).status_code == 200
        await until(lambda: notifier.calls)
        assert (len(gateway.turns.records), gateway.turns.announced) == (3, {})
