"""Stored turns are announced behind the chat's back; a chat neither waits for it nor notices its failure."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from api.recording import notifier as notifier_module
from clawloop.contracts.sessions import TurnRecorded
from clawloop.ids import turn_id_of
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier


@asynccontextmanager
async def announcing_gateway(folder: Path, notifier: FakeNotifier) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(folder, engines=[engine], notifier=notifier) as running:
        yield running


async def chat(gateway: Gateway, **fields: object) -> str:
    async with gateway.client() as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]} | fields
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    response: str = answer.json()["id"]
    return response


class Clock:
    """Stands in for the module `time` where a test decides when a while is over."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def until(true: object, seconds: float = 30) -> None:
    assert callable(true)
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def test_each_main_turn_is_announced_once_with_ids_and_noted(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with announcing_gateway(tmp_path, notifier) as gateway:
        said = [await chat(gateway, session_id="s", session_done=done) for done in (False, True)]
        await chat(gateway, session_id="s", turn_type="side")
        await until(lambda: len(gateway.turns.announced) == 2)
    turns = [turn_id_of(response) for response in said]
    assert [message for _, message in notifier.sent] == [
        TurnRecorded(turns[0], 0, ends_session=False),  # type: ignore[arg-type]
        TurnRecorded(turns[1], 0, ends_session=True),  # type: ignore[arg-type]
    ]
    assert len({session.session_id for session, _ in notifier.sent}) == 1
    assert {(session.policy, session.identified_by) for session, _ in notifier.sent} == {("default", "session_id")}


async def test_every_choice_of_a_request_is_a_turn_of_its_own(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with announcing_gateway(tmp_path, notifier) as gateway:
        await chat(gateway, n=3)
        await until(lambda: len(gateway.turns.announced) == 3)


async def test_what_cannot_be_announced_waits_for_the_sweep_and_later_turns_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(notifier_module, "time", clock)
    notifier = FakeNotifier()
    notifier.available = False
    async with announcing_gateway(tmp_path, notifier) as gateway:
        clock.now = 1.0
        await chat(gateway)
        await until(lambda: notifier.calls == 1)
        clock.now += notifier_module.PAUSE_SECONDS - 0.1
        await chat(gateway)  # within the quiet time: not even tried
        assert notifier.calls == 1
        notifier.available = True
        clock.now += 0.2
        last = await chat(gateway)
        await until(lambda: gateway.turns.announced)
        assert list(gateway.turns.announced) == [turn_id_of(last)]
        assert len(gateway.turns.records) == 3


async def test_a_turn_is_told_again_when_it_could_not_be_noted(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with announcing_gateway(tmp_path, notifier) as gateway:
        gateway.turns.available = False
        await chat(gateway)  # spooled
        await asyncio.sleep(0.1)
        assert notifier.sent == []
        gateway.turns.available = True
        await until(lambda: len(gateway.turns.announced) == 1)


@pytest.mark.slow
async def test_what_waits_to_be_announced_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "QUEUE_LIMIT", 2)
    notifier = FakeNotifier()
    notifier.hangs = True
    async with announcing_gateway(tmp_path, notifier) as gateway:
        for _ in range(6):
            await chat(gateway, session_id="one")
        left = gateway.services.metrics.notifications.labels("left to the sweep")
        # One on its way, at most two more waiting behind it.
        assert left._value.get() >= 3
        assert notifier.calls == 1


@pytest.mark.slow
async def test_a_chat_is_as_quick_while_announcing_hangs_or_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well, hanging, away = FakeNotifier(), FakeNotifier(), FakeNotifier()
    hanging.hangs, away.available = True, False
    took: dict[str, list[float]] = {"told": [], "hangs": [], "away": []}
    async with (
        announcing_gateway(tmp_path / "a", well) as told,
        announcing_gateway(tmp_path / "b", hanging) as hung,
        announcing_gateway(tmp_path / "c", away) as failing,
    ):
        async with AsyncExitStack() as clients:
            ways = [
                (name, await clients.enter_async_context(gateway.client()))
                for name, gateway in (("told", told), ("hangs", hung), ("away", failing))
            ]
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            for turn in range(31):
                for name, client in ways[turn % 3 :] + ways[: turn % 3]:
                    began = time.perf_counter()
                    await client.post("/v1/chat/completions", json=body)
                    took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) * 1000 for name, times in took.items()}
    with capsys.disabled():
        print("\nchat, median ms:", {name: round(value, 1) for name, value in medians.items()})  # noqa: T201
    # A chat that waited would do so each time; what a busy machine adds, it adds to some. In milliseconds.
    quicker = {name: statistics.quantiles(times, n=4)[0] * 1000 for name, times in took.items()}
    assert max(quicker["hangs"], quicker["away"]) < quicker["told"] + 15, medians
