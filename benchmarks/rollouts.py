"""Episodes of one environment of verifiers and one stub engine: by verifiers alone, and through rollouts.

The same tasks, harness and engine, as many episodes in flight. By default the engine takes 5 s of each episode, and
both cases leave cores idle, which `cores busy` tells: what is compared is what an episode waits for beside its engine.

Through rollouts means: gateway, PostgreSQL, Temporal's development server, orchestrator, and the worker in a Python
environment of its own. Rewards are all equal, so that no group makes samples and nothing waits for training. Then
processes are killed by `kill -9` and started again while episodes run, some of them in sandboxes, and the ledger says
what was lost or done twice, also of the turns of episodes with a reward, and the machine what was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psycopg

from benchmarks.episode_ledger import Scored, count_by_environment, places_since, scored_since, turns_lost
from benchmarks.parts import Part, Postgres, Program, Temporal
from benchmarks.processes import LOOPBACK, cpu_seconds, free_port, module
from benchmarks.report import Figure, Ratio, Result
from clawloop.app.processes.bootstrap import prepare
from clawloop.core.contracts.serving import Scope
from db.database import BACKGROUND_LIMIT, Database
from db.serving.keys import PostgresKeyStore
from tests.environments.foreign_python import FOREIGN, foreign_python

SIZE = 8
_ENVIRONMENT = "vf_sums"
# While processes are killed: agents that ask once, in sandboxes.
_BOXED, _BOXED_POLICY = "tool-call", "boxed"
# Of an agent that says that it is done: one was told to wait first.
_REPLIES = {_ENVIRONMENT: 2, _BOXED: 1}
# Rollouts would pause after so many groups without a sample.
_NEVER = 2**31 - 1
_ENDED_SECONDS = 600.0
# A gateway's disk may have turns when their groups are settled already; it is emptied within seconds.
_STORED_SECONDS = 120.0
_DONE = "SELECT count(*) FROM episodes WHERE state = 'scored'"
# Nothing else of ours runs while episodes are measured.
_MEASURED = ("gateway", "orchestrator", "worker")
_KILLED = ("worker", "postgres", "boxes", "temporal", "orchestrator", "engine", "worker", "boxes", "gateway")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--tokens", type=int, default=128, help="of each reply, two of them an episode")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a token")
    parser.add_argument("--in-flight", type=int, default=16, help="episodes at a time, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=None, help="default: 2; 1 with --quick")
    parser.add_argument("--kills", type=int, default=None, help="default: 10; 2 with --quick")


class BusyCores:
    """Number of the machine's busy cores, over all its programs."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[BusyCores]:
        cores, ended = cls(), threading.Event()
        thread = threading.Thread(target=cores._watch, args=(ended,))
        thread.start()
        try:
            yield cores
        finally:
            ended.set()
            thread.join()

    def between(self, began: float, ended: float) -> float:
        """Their mean number, by the clock `time.monotonic`, which all processes share."""
        seen = [sample for sample in self._seen if began <= sample[0] <= ended]
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])

    def _watch(self, ended: threading.Event) -> None:
        import psutil

        while not ended.wait(0.25):
            times = psutil.cpu_times()
            busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice - times.steal
            self._seen.append((time.monotonic(), busy))


@dataclass(frozen=True)
class Measured:
    """
    Args:
        cpu: seconds of each process for an episode.
        cores: busy on the whole machine meanwhile, with engine, measurement and whatever else runs. As many as there
            are, and it is the machine's speed that is measured, not what an episode waits for.
    """

    per_second: float
    cpu: Mapping[str, float]
    in_flight: int
    cores: float


def run(options: argparse.Namespace) -> Result:
    if options.in_flight % SIZE:
        raise SystemExit(f"--in-flight must be a multiple of {SIZE}")
    rounds, kills = options.rounds or (1 if options.quick else 2), options.kills
    kills = (2 if options.quick else 10) if kills is None else kills
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        installed = foreign_python(folder / "wheel")
        engine = f"http://{LOOPBACK}:{(port := free_port())}"
        command = module("benchmarks.episode_engine", port, options.tokens, options.milliseconds)
        stub = Program(command, folder / "engine.log", f"{engine}/health", {}, stack)
        stub.start()
        busy = stack.enter_context(BusyCores.watched())
        system = System(folder, installed, engine, stub, options.in_flight, busy, stack)
        alone: list[Measured] = []
        through: list[Measured] = []
        for _ in range(rounds):
            alone.append(_alone(installed, engine, options.in_flight, busy, folder))
            through.append(system.measured())
        killed = system.killed(kills, random.Random(options.seed)) if kills else {}
    rows = [_row("verifiers alone", one) for one in alone] + [_row("through rollouts", one) for one in through]
    speed, cpu = (
        [median(one.per_second for one in case) for case in (through, alone)],
        [median(sum(one.cpu.values()) for one in case) for case in (through, alone)],
    )
    ratios = {
        "episodes/s, through rollouts to alone": Ratio(speed[0] / speed[1], "higher", 0.9),
        "CPU of an episode, through rollouts to alone": Ratio(cpu[0] / cpu[1], "lower"),
    }
    ratios |= {f"{name} after {kills} kills": Ratio(float(killed[name]), "lower", 0.0) for name in _FAULTS if killed}
    raw = {f"CPU s an episode, {name}": [one.cpu[name] for one in through] for name in through[0].cpu}
    raw |= {name: [float(number)] for name, number in killed.items()}
    return Result(rows, ratios, raw)


_FAULTS = ("lost", "turns lost", "doubled", "environments without a reward", "left behind")


def _row(case: str, one: Measured) -> dict[str, Figure]:
    return {
        "case": case,
        "in flight": one.in_flight,
        "episodes/s": one.per_second,
        "CPU ms an episode": 1000 * sum(one.cpu.values()),
        "of which the worker": 1000 * one.cpu["worker"],
        "cores busy": one.cores,
    }


def _foreign_variables(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(FOREIGN), "OMP_NUM_THREADS": "1"}


def _alone(installed: Path, engine: str, in_flight: int, busy: BusyCores, folder: Path) -> Measured:
    """Episodes that end while all places are taken: without the first and the last `in_flight` of them."""
    program = Path(__file__).with_name("verifiers_alone.py")
    command = [str(installed / "python"), str(program), engine, str(6 * in_flight), str(in_flight)]
    done = subprocess.run(
        command, env=_foreign_variables(folder / "alone"), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"verifiers alone failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if set(found["rewards"]) != {2.0}:
        raise RuntimeError(f"verifiers alone gave rewards {set(found['rewards'])}")
    first, last = in_flight, 5 * in_flight
    ended, cpu = found["ended"], found["cpu"]
    episodes, cores = last - first, busy.between(ended[first], ended[last])
    spent = {"worker": (cpu[last] - cpu[first]) / episodes}
    return Measured(episodes / (ended[last] - ended[first]), spent, in_flight, cores)


class System:
    """All of Clawloop that episodes need, with its worker in a Python environment of its own."""

    def __init__(
        self, folder: Path, installed: Path, engine: str, stub: Part, in_flight: int, busy: BusyCores, stack: ExitStack
    ) -> None:
        self._in_flight = in_flight
        self._busy = busy
        self._started: set[str] = set()
        self._home = folder / "home"
        postgres, temporal = Postgres(folder / "postgres", stack), Temporal(folder / "temporal", stack)
        for service in (postgres, temporal):
            service.start()
        self._url = postgres.server.url
        keys = asyncio.run(prepare(self._url, "tiny", [], [engine], {}))
        # One for all: PostgreSQL starts a process for each, which would count as an episode's.
        self._connection = psycopg.connect(self._url, autocommit=True)
        stack.callback(lambda: self._connection.close())
        self._admin = {"Authorization": f"Bearer {keys['admin']}"}
        port, data = free_port(), folder / "data"
        data.mkdir()
        ours = {"DATABASE_URL": self._url, "TEMPORAL_ADDRESS": temporal.address, "CLAWLOOP_DATA": str(data)}
        foreign = _foreign_variables(self._home) | {"CLAWLOOP_WORKER_KEY": asyncio.run(_worker_key(self._url))}
        self._gateway = f"http://{LOOPBACK}:{port}"
        # Sandboxes have users of their own, who must be able to pass through it; and sockets need a short path.
        self._temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clb-")))
        self._temporary.chmod(0o711)
        boxed = ours | {"TMPDIR": str(self._temporary)}
        foreign |= {"TMPDIR": str(self._temporary)}
        health = {name: free_port() for name in ("orchestrator", "worker", "boxes")}
        commands = {
            "gateway": module("clawloop.app.cli.main", "gateway", "--port", port),
            "orchestrator": module(
                "clawloop.app.cli.main", "worker", "orchestrator", "--health-port", health["orchestrator"]
            ),
            "worker": [
                *(str(installed / "clawloop-environment"), "--verifiers", _ENVIRONMENT, "--gateway", self._gateway),
                *("--temporal", temporal.address, "--episodes", str(in_flight), "--health-port", str(health["worker"])),
            ],
            "boxes": [
                *module("clawloop.app.cli.main", "worker", "environment", "--environment", _BOXED),
                *("--gateway", self._gateway, "--health-port", str(health["boxes"])),
            ],
        }
        variables = {"worker": foreign, "boxes": boxed}
        self._programs: dict[str, Program] = {}
        for name, command in commands.items():
            ready = f"{self._gateway}/readyz" if name == "gateway" else f"http://{LOOPBACK}:{health[name]}/readyz"
            self._programs[name] = Program(command, folder / f"{name}.log", ready, variables.get(name, ours), stack)
            if name in _MEASURED:
                self._programs[name].start()
        self.parts: dict[str, Part] = {"engine": stub, "postgres": postgres, "temporal": temporal, **self._programs}

    def measured(self) -> Measured:
        """Four times as many episodes as are in flight, while all places are taken."""
        self._start()
        self._wait_for_episodes(self._count(_DONE) + self._in_flight)
        began, before, cpu = time.monotonic(), self._count(_DONE), self._cpu()
        most = self._wait_for_episodes(before + 4 * self._in_flight)
        episodes, ended = self._count(_DONE) - before, time.monotonic()
        spent = {name: (after - cpu[name]) / episodes for name, after in self._cpu().items()}
        self._end()
        return Measured(episodes / (ended - began), spent, most, self._busy.between(began, ended))

    def killed(self, kills: int, chance: random.Random) -> dict[str, int]:
        """Kill a process every few seconds while episodes run; what the ledger says afterwards."""
        since = self._value("SELECT now()")
        self._programs["boxes"].start()
        self._ask("POST", "/admin/v1/policies", {"name": _BOXED_POLICY})
        self._start()
        self._start(_BOXED, _BOXED_POLICY, 1)
        for number in range(kills):
            time.sleep(chance.uniform(2.0, 8.0))
            part = self.parts[_KILLED[number % len(_KILLED)]]
            part.kill()
            part.start()
            if part is self.parts["postgres"]:
                self._connection.close()
                self._connection = psycopg.connect(self._url, autocommit=True)
        self._end()
        scored = self._scored(since)
        counts = count_by_environment(scored, _REPLIES)
        found = places_since(self._connection, since) | {"turns lost": turns_lost(scored, _REPLIES)}
        found |= {f"scored, {environment}": count for environment, count in counts.items()}
        found["environments without a reward"] = sum(not count for count in counts.values())
        # Their agents were blamed for a kill. How many replies they had is not known.
        found["scored, though not completed"] = sum(not one.completed for one in scored)
        for name in ("worker", "boxes"):
            self._programs[name].process.send_signal(signal.SIGTERM)
            self._programs[name].process.wait(60)
        left = [*(self._home / ".cache/verifiers/runtimes/subprocess").glob("*"), *self._temporary.glob("clawloop-*")]
        found["left behind"] = len(left) + _running_in(self._temporary)
        print(f"after {kills} kills: {', '.join(f'{name} {count}' for name, count in found.items())}", flush=True)
        return found

    def _scored(self, since: datetime) -> list[Scored]:
        """The episodes with a reward, once all their turns are stored or had the time to be."""
        deadline = time.monotonic() + _STORED_SECONDS
        while turns_lost(scored := scored_since(self._connection, since), _REPLIES) and time.monotonic() < deadline:
            time.sleep(1)
        return scored

    def _start(self, environment: str = _ENVIRONMENT, policy: str = "default", groups: int | None = None) -> None:
        plan = {"environment": environment, "size": SIZE, "groups": groups or self._in_flight // SIZE, "barren": _NEVER}
        self._ask("POST", f"/admin/v1/rollouts/start?policy={policy}", plan)
        self._started.add(policy)

    def _end(self) -> None:
        """Until all groups are settled."""
        for policy in self._started:
            self._ask("POST", f"/admin/v1/rollouts/pause?policy={policy}", {"reason": "measured"})
        deadline = time.monotonic() + _ENDED_SECONDS
        while self._count("SELECT count(*) FROM rollout_groups WHERE state = 'open'"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"groups are open {_ENDED_SECONDS:g} s after the pause")
            time.sleep(0.2)

    def _wait_for_episodes(self, count: int) -> int:
        """Until so many are scored; the most that ran at the same time."""
        deadline, most = time.monotonic() + _ENDED_SECONDS, 0
        while self._count(_DONE) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._count(_DONE)} episodes instead of {count} in {_ENDED_SECONDS:g} s")
            most = max(most, self._count("SELECT count(*) FROM episodes WHERE state = 'running'"))
            time.sleep(0.2)
        return most

    def _cpu(self) -> dict[str, float]:
        found = {name: cpu_seconds(self._programs[name].process) for name in _MEASURED}
        return found | _services_cpu()

    def _ask(self, method: str, path: str, body: Mapping[str, object]) -> None:
        httpx.request(method, f"{self._gateway}{path}", json=body, headers=self._admin, timeout=60).raise_for_status()

    def _count(self, query: str) -> int:
        return int(self._value(query))

    def _value(self, query: str) -> Any:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def _running_in(folder: Path) -> int:
    """Processes that name the folder: sandboxes are told where theirs is."""
    import psutil

    commands = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    return sum(any(str(folder) in word for word in command) for command in commands)


def _services_cpu() -> dict[str, float]:
    """CPU seconds of this process's children: Temporal's development server, and all PostgreSQL processes."""
    import psutil

    found = {"Temporal": 0.0, "PostgreSQL": 0.0}
    for child in psutil.Process().children(recursive=True):
        try:
            name = {"temporal": "Temporal", "postgres": "PostgreSQL"}.get(child.name())
            if name is not None:
                times = child.cpu_times()
                found[name] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


async def _worker_key(url: str) -> str:
    database = Database(url, BACKGROUND_LIMIT)
    try:
        return (await PostgresKeyStore(database).create_key("default", {Scope.WORKER}, "worker"))[1]
    finally:
        await database.close()


if __name__ == "__main__":
    sys.exit("python -m benchmarks rollouts")
