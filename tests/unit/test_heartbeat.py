"""A heartbeat beside the work: it beats, ends with the work, and never hides what went wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment
from temporalio.worker import WorkerConfig

from clawloop.app.temporal.plugin import ClawloopPlugin, connect
from clawloop.core.heartbeat import heartbeating
from workflows import activity_options


def environment(beat: Any) -> ActivityEnvironment:
    made = ActivityEnvironment()
    made.info = replace(made.info, heartbeat_timeout=timedelta(seconds=0.02))
    made.on_heartbeat = beat
    return made


async def test_it_beats_while_the_work_lasts_and_no_longer() -> None:
    beats: list[object] = []

    async def work() -> int:
        async with heartbeating():
            async with asyncio.timeout(30):
                while len(beats) < 3:
                    await asyncio.sleep(0.005)
        return len(beats)

    during = await environment(lambda *_: beats.append(None)).run(work)
    assert during >= 3
    await asyncio.sleep(0.05)
    assert len(beats) == during


async def test_a_beat_that_breaks_ends_the_work() -> None:
    def broken(*_: object) -> None:
        raise OSError("no beat")

    async def work() -> None:
        async with heartbeating():
            await asyncio.sleep(60)

    with pytest.raises(OSError, match="no beat"):
        await environment(broken).run(work)


async def test_the_works_own_error_comes_out() -> None:
    async def work() -> None:
        async with heartbeating():
            raise ValueError("the work's")

    with pytest.raises(ValueError, match="the work's"):
        await environment(lambda *_: None).run(work)


async def test_workers_keep_no_beat_back() -> None:
    config: WorkerConfig = {"client": await connect("127.0.0.1:1", lazy=True)}
    told = ClawloopPlugin().configure_worker(config).get("max_heartbeat_throttle_interval", timedelta.max)
    limits = [
        options["heartbeat_timeout"]
        for options in vars(activity_options).values()
        if isinstance(options, dict) and "heartbeat_timeout" in options
    ]
    assert told < min(limits) / 2


async def test_outside_an_activity_it_is_nothing() -> None:
    async with heartbeating():
        pass
