"""Every kind of fault, and a choice among them by seed. A fault is over when `inject` returns."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from activities.serving.engines import KEEP
from clawloop.core.crash_points import CrashPoint
from tests.chaos.full_disk import full_disk
from tests.chaos.stack import RANK, Stack, family

SERVICES = ("temporal", "postgres")
PROXIES = ("gateway", "postgres", "temporal", "engine")
# An engine starts in a minute or two; then only something that hangs is left.
RECOVERY_SECONDS = 600.0
# A point that needs a step, or a version that retires, is reached within a minute; on a busy machine it takes as long
# as a step may take. One that is not reached stays untested.
REACHED_WITHIN_SECONDS = RECOVERY_SECONDS
# While others hold all connections, one that is given back is taken within so many seconds.
TAKEN_AGAIN_SECONDS = 0.05
# What a point is reached by is done again after this long: a process may have been starting, PostgreSQL away.
AGAIN_SECONDS = 5.0
# Longer than Temporal waits for a heartbeat and PostgreSQL for a client: others take over what a process was doing, and
# then it goes on as if nothing had happened. From a minute on the supervisor kills it.
LONG_SECONDS = (35.0, 75.0)

_TOO_MANY = "too many clients"  # a refused login has no SQLSTATE in psycopg
CRASH = "crash "  # what the kinds of crash points begin with
WHILE_PRACTISING = frozenset({CrashPoint.PRACTICE_ANSWERED, CrashPoint.PRACTICE_STORED})

Inject = Callable[[Stack, random.Random], Awaitable[None]]


class NotReached(Exception):
    """The process did not come to the point that was armed, or there was nothing that a fault could affect."""


@dataclass(frozen=True, slots=True)
class Fault:
    """
    Args:
        weight: how often it is chosen, relative to others.
    """

    kind: str
    inject: Inject
    weight: float = 1.0


def all_faults(stack: Stack, longest_seconds: float = 8.0) -> list[Fault]:
    """The faults that can be injected into this stack.

    Args:
        longest_seconds: how long a fault that lasts lasts at most.
    """
    lasting, long = Lasting(longest_seconds / 5, longest_seconds), Lasting(*LONG_SECONDS)
    faults = [Fault(f"kill {part}", _kill(part), 2.0) for part in (*stack.ours, *SERVICES)]
    faults += [Fault(f"stop {part}", lasting.stop(part)) for part in (*stack.ours, *SERVICES)]
    faults += [Fault(f"stop {part} for long", long.stop(part), 0.25) for part in (*stack.ours, *SERVICES)]
    points = [point for point in CrashPoint if stack.practises or point not in WHILE_PRACTISING]
    faults += [Fault(f"{CRASH}{point}", _crash(point)) for point in points]
    for name in PROXIES:
        faults += [
            _of_connections("cut", name, _cut(name)),
            Fault(f"refuse {name}", lasting.refuse(name), 0.5),
            _of_connections("delay", name, lasting.delay(name)),
            _of_connections("silence", name, _silence(name)),
        ]
    # What PostgreSQL sends at its login differs each time, so that a doubled login fails, and the double does nothing.
    faults += [_of_connections("double", name, lasting.double(name)) for name in ("gateway", "temporal", "engine")]
    faults += [
        Fault("postgres backend killed", _kill_backend),
        Fault("postgres read-only", lasting.read_only),
        Fault("postgres out of connections", lasting.out_of_connections),
        Fault("disk full, data", lasting.fill(lambda stack: stack.data)),
        Fault("disk full, postgres", lasting.fill(lambda stack: stack.folder / "postgres")),
        Fault("temporal's database lost", _lose_temporal, 0.5),
    ]
    if stack.ranks > 1:
        faults += [Fault(f"kill {RANK}", _kill(RANK), 2.0), Fault(f"stop {RANK}", lasting.stop_one(RANK))]
        faults.append(Fault(f"stop {RANK} for long", long.stop_one(RANK), 0.25))
    if stack.judges > 1:
        # The others take over what the stopped one was judging, and then it goes on.
        faults.append(Fault("stop one judge", lasting.stop_one("judge")))
        faults.append(Fault("stop one judge for long", long.stop_one("judge")))
    if stack.own_engine:
        rest = sum(fault.weight for fault in faults)
        faults.append(Fault("kill vllm", _kill("vllm"), rest / 16))
        faults.append(Fault("stop vllm", lasting.stop("vllm"), rest / 32))
    return faults


def choose(faults: Sequence[Fault], runs: int, chance: random.Random) -> list[Fault]:
    """So many faults by weight, in the order in which they are injected.

    Up to half of them are each crash point once: by weight alone every fifth run of 200 leaves one out.
    """
    points = [fault for fault in faults if fault.kind.startswith(CRASH)]
    once = chance.sample(points, min(len(points), runs // 2))
    chosen = once + chance.choices(faults, [fault.weight for fault in faults], k=runs - len(once))
    chance.shuffle(chosen)
    return chosen


class Lasting:
    """Faults that last for a while.

    Args:
        shortest_seconds, longest_seconds: chosen between these.
    """

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = longest_seconds

    def _seconds(self, chance: random.Random) -> float:
        return chance.uniform(self._shortest_seconds, self._longest_seconds)

    async def _last(self, chance: random.Random) -> None:
        await asyncio.sleep(self._seconds(chance))

    def stop(self, part: str) -> Inject:
        async def stop(stack: Stack, chance: random.Random) -> None:
            await self._stop(await _running(stack, part), chance)

        return stop

    def stop_one(self, part: str) -> Inject:
        async def stop(stack: Stack, chance: random.Random) -> None:
            await self._stop([chance.choice(await _running(stack, part))], chance)

        return stop

    async def _stop(self, stopped: Sequence[psutil.Process], chance: random.Random) -> None:
        processes = [one for process in stopped for one in family(process)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            await self._last(chance)
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def refuse(self, name: str) -> Inject:
        async def refuse(stack: Stack, chance: random.Random) -> None:
            await stack.proxies[name].refuse()
            try:
                await self._last(chance)
            finally:
                await stack.proxies[name].listen()

        return refuse

    def delay(self, name: str) -> Inject:
        async def delay(stack: Stack, chance: random.Random) -> None:
            stack.proxies[name].delay_seconds = chance.uniform(0.1, 1)
            try:
                await self._last(chance)
            finally:
                stack.proxies[name].delay_seconds = 0

        return delay

    def double(self, name: str) -> Inject:
        async def double(stack: Stack, chance: random.Random) -> None:
            proxy = stack.proxies[name]
            proxy.doubled = True
            proxy.cut()
            try:
                await self._last(chance)
            finally:
                proxy.doubled = False
                proxy.cut()

        return double

    async def read_only(self, stack: Stack, chance: random.Random) -> None:
        await asyncio.to_thread(_set_read_only, stack.database_url, True)
        try:
            await self._last(chance)
        finally:
            await asyncio.to_thread(_set_read_only, stack.database_url, False)

    async def out_of_connections(self, stack: Stack, chance: random.Random) -> None:
        """Others take every connection that PostgreSQL allows, those of the stack included, and each that is freed."""
        held: list[psycopg.Connection] = []
        until = time.monotonic() + self._seconds(chance)
        try:
            await asyncio.to_thread(_take_all_connections, stack.database_url, held)
            await asyncio.to_thread(_end_other_connections, held)
            while time.monotonic() < until:
                await asyncio.to_thread(_take_all_connections, stack.database_url, held)
                await asyncio.sleep(TAKEN_AGAIN_SECONDS)
        finally:
            for connection in held:
                connection.close()

    def fill(self, folder_of: Callable[[Stack], Path]) -> Inject:
        async def fill(stack: Stack, chance: random.Random) -> None:
            """
            Raises:
                NotReached: PostgreSQL's folder has no disk of its own.
            """
            folder = folder_of(stack)
            if folder != stack.data and not os.path.ismount(folder):
                raise NotReached("only files of our own processes can be limited")
            async with full_disk(stack, folder):
                await self._last(chance)
            # Training that found no room waits for its operator.
            await run_command(stack, "training", "resume")

        return fill


def _kill(part: str) -> Inject:
    async def kill(stack: Stack, chance: random.Random) -> None:
        chance.choice(await _running(stack, part)).kill()

    return kill


def _crash(point: CrashPoint) -> Inject:
    async def crash(stack: Stack, chance: random.Random) -> None:
        armed = stack.crash_points / point
        armed.touch()
        bring_about = _BRINGS_ABOUT.get(point)
        began = time.monotonic()
        again_at = began
        while armed.exists():
            now = time.monotonic()
            if now > began + REACHED_WITHIN_SECONDS:
                armed.unlink(missing_ok=True)
                raise NotReached(point)
            if bring_about is not None and now >= again_at:
                await bring_about(stack)
                again_at = now + AGAIN_SECONDS
            await asyncio.sleep(0.02)

    return crash


async def _end_a_gateway(stack: Stack) -> None:
    with suppress(psutil.NoSuchProcess):
        (await _running(stack, "gateway"))[0].terminate()


async def _age_versions(stack: Stack) -> None:
    """As if another version had taken their place a while ago; the engine's agent then unloads them."""
    with suppress(psycopg.OperationalError):
        await asyncio.to_thread(_set_back, stack.database_url)


def _set_back(url: str) -> None:
    with psycopg.connect(url) as connection:
        for column, table in (("retired_at", "versions"), ("loaded_at", "engine_versions")):
            connection.execute(f"UPDATE {table} SET {column} = now() - %s WHERE {column} > now() - %s", [KEEP, KEEP])


# The other points are on the way of every chat, judgement or step.
_BRINGS_ABOUT: dict[CrashPoint, Callable[[Stack], Awaitable[None]]] = {
    CrashPoint.GATEWAY_SHUTDOWN: _end_a_gateway,
    CrashPoint.UNROUTED_NOT_UNLOADED: _age_versions,
}


def _of_connections(what: str, name: str, inject: Inject) -> Fault:
    """Injected until it affects a connection through a proxy: at a moment there may be none."""

    async def affect(stack: Stack, chance: random.Random) -> None:
        affected, began = stack.proxies[name].affected, time.monotonic()
        before = affected[what]
        while True:
            await inject(stack, chance)
            if affected[what] > before:
                return
            if time.monotonic() > began + REACHED_WITHIN_SECONDS:
                raise NotReached(f"nothing went to {name}")
            await asyncio.sleep(0.2)

    return Fault(f"{what} {name}", affect, 0.5)


def _cut(name: str) -> Inject:
    async def cut(stack: Stack, chance: random.Random) -> None:
        stack.proxies[name].cut()

    return cut


def _silence(name: str) -> Inject:
    async def silence(stack: Stack, chance: random.Random) -> None:
        stack.proxies[name].silence()

    return silence


async def _kill_backend(stack: Stack, chance: random.Random) -> None:
    """PostgreSQL then ends all its sessions and recovers."""
    main, *others = await _running(stack, "postgres")
    with suppress(psutil.NoSuchProcess):  # backends come and go
        chance.choice(main.children() or others).kill()


def _set_read_only(url: str, on: bool) -> None:
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
        connection.execute("SELECT pg_reload_conf()")


def _take_all_connections(url: str, held: list[psycopg.Connection]) -> None:
    """Connect until PostgreSQL refuses.

    Raises:
        psycopg.OperationalError: refused for another reason than that there are too many.
    """
    while True:
        try:
            held.append(psycopg.connect(url, autocommit=True, connect_timeout=5))
        except psycopg.OperationalError as error:
            if _TOO_MANY not in str(error):
                raise
            return


def _end_other_connections(held: Sequence[psycopg.Connection]) -> None:
    ours = [connection.info.backend_pid for connection in held]
    held[0].execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> ALL(%s)",
        [ours],
    )


async def _lose_temporal(stack: Stack, chance: random.Random) -> None:
    for process in await _running(stack, "temporal"):
        process.send_signal(signal.SIGKILL)
    for file in stack.temporal_folder.glob("temporal.db*"):
        file.unlink()
    # The stack must get on without it, too. Chosen without a draw, so that a seed's other faults stay what they were.
    if random.Random(repr(chance.getstate())).random() < 0.5:
        await run_command(stack, "recover")


async def run_command(stack: Stack, *words: str) -> None:
    """Run a verb of `clawloop` until it succeeds: a service may still be starting."""
    command = [sys.executable, "-m", "clawloop.app.cli.main", *words, "--data", str(stack.data)]
    deadline = time.monotonic() + REACHED_WITHIN_SECONDS
    while True:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stderr
        await asyncio.sleep(0.5)


async def _running(stack: Stack, part: str) -> list[psutil.Process]:
    """The processes of a part, once it runs: it may still be starting after the fault before."""
    deadline = time.monotonic() + REACHED_WITHIN_SECONDS
    while not (processes := stack.processes(part)):
        assert time.monotonic() < deadline, f"{part} does not run"
        await asyncio.sleep(0.1)
    return processes
