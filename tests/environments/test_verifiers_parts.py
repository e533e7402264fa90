"""What of the plug for verifiers needs no verifiers: endings and rewards, the relay, options of the program."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from clawloop.app.cli.remote_environment import _parser, worker_of
from clawloop.core.contracts.episodes import Ending, RewardRange
from clawloop.core.errors import SetupError
from clawloop.environments.task import Split
from clawloop.environments.verifiers import runner as runner_module
from clawloop.environments.verifiers.loading import require_images, split_tasks
from clawloop.environments.verifiers.runner import (
    SESSION_HEADER,
    WORKING_FOLDERS,
    KeyRelay,
    kept_reward,
    outcome_of,
    sweep_rollouts,
    unanswered,
)

RANGE = RewardRange(0.0, 2.0)


@pytest.fixture(autouse=True)
def _some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "version", lambda name: "0.4.0")


def trace(stop: str = "agent_completed", *, status: int | None = None, **changes: Any) -> SimpleNamespace:
    """What is read of a trace of verifiers."""
    failed = stop.endswith("error")
    errors = [SimpleNamespace(type="SomeError", status_code=status)] if failed else []
    rewards = {"right": SimpleNamespace(value=2.0), "short": SimpleNamespace(value=-0.5)}
    values = {
        "agent": SimpleNamespace(name="agent"),
        "stop_condition": stop,
        "ok": not failed,
        "errors": errors,
        "last_error": errors[-1] if errors else None,
        "rewards": rewards,
        "reward": 1.5,
        "metrics": {"turns": 2.0},
        "is_truncated": False,
    }
    return SimpleNamespace(**(values | changes))


def episode(*traces: SimpleNamespace, ok: bool = True) -> SimpleNamespace:
    return SimpleNamespace(traces=list(traces), ok=ok, errors=[])


@pytest.mark.parametrize(
    ("run", "ending"),
    [
        (trace(), Ending.COMPLETED),
        (trace("a_stop_of_the_task"), Ending.COMPLETED),
        (trace("max_turns"), Ending.TRUNCATED_TURNS),
        (trace("max_output_tokens"), Ending.TRUNCATED_TOKENS),
        (trace(is_truncated=True), Ending.TRUNCATED_TOKENS),
        (trace("agent_timeout"), Ending.TRUNCATED_TIME),
    ],
)
def test_a_run_that_ended_is_rewarded_by_its_environment(run: SimpleNamespace, ending: Ending) -> None:
    found = outcome_of(episode(run), "agent", RANGE)
    assert (found.ending, found.reason, found.verdict) == (ending, "", (0.75, ""))
    assert kept_reward(found.artifact, RANGE) == (0.75, "")


@pytest.mark.parametrize(
    ("run", "ending"),
    [
        (trace("provider_error", status=400), Ending.AGENT_ERROR),
        (trace("provider_error", status=503), Ending.INFRASTRUCTURE),
        (trace("provider_error"), Ending.INFRASTRUCTURE),
        (trace("harness_error"), Ending.AGENT_ERROR),
        (trace("sandbox_error"), Ending.INFRASTRUCTURE),
        (trace("task_error"), Ending.INFRASTRUCTURE),
        (trace("error"), Ending.INFRASTRUCTURE),
        (trace("setup_timeout"), Ending.INFRASTRUCTURE),
    ],
)
def test_a_run_that_failed_has_no_reward_which_is_not_0(run: SimpleNamespace, ending: Ending) -> None:
    found = outcome_of(episode(run, ok=False), "agent", RANGE)
    assert found.ending is ending
    reward, why = kept_reward(found.artifact, RANGE)
    assert reward is None
    assert why
    # What failed with the infrastructure is tried again, and not verified.
    assert found.verdict == (None if ending is Ending.INFRASTRUCTURE else (None, why))


def test_scoring_that_failed_leaves_the_run_completed_and_without_a_reward() -> None:
    failed = trace(ok=False, errors=[SimpleNamespace(type="TaskError", status_code=None)])
    found = outcome_of(episode(failed, ok=False), "agent", RANGE)
    assert found.ending is Ending.COMPLETED
    assert kept_reward(found.artifact, RANGE) == (None, "not scored: TaskError")
    unscored = outcome_of(episode(trace(rewards={"right": None})), "agent", RANGE)
    assert kept_reward(unscored.artifact, RANGE) == (None, "the environment gave no reward right")
    for reward in (float("nan"), 1e7):
        found = outcome_of(episode(trace(reward=reward)), "agent", RANGE)
        assert found.verdict == kept_reward(found.artifact, RANGE)
        assert found.verdict[0] is None


def test_a_reward_outside_of_the_environments_range_is_refused_with_the_remedy() -> None:
    found = outcome_of(episode(trace(reward=1.5)), "agent", RewardRange())
    assert found.verdict == (
        None,
        "the verifier's reward 1.5 is not between 0 and 1: give the worker --reward-range LOW HIGH",
    )


def test_only_one_run_of_the_policy_can_be_rewarded() -> None:
    judge = trace(agent=SimpleNamespace(name="judge"), reward=0.0)
    assert kept_reward(outcome_of(episode(judge, trace()), "agent", RANGE).artifact, RANGE) == (0.75, "")
    twice = outcome_of(episode(trace(), trace()), "agent", RANGE)
    assert kept_reward(twice.artifact, RANGE) == (
        None,
        "the policy played 2 times in one episode, which has one reward",
    )
    assert outcome_of(episode(judge), "agent", RANGE).ending is Ending.INFRASTRUCTURE


def test_an_episode_that_hung_and_an_artifact_that_is_none_have_reasons() -> None:
    assert kept_reward(unanswered(90.0).artifact, RANGE) == (None, "it did not end in 90 s")
    assert kept_reward(b"", RANGE) == (None, "what was kept of the episode cannot be read")


def test_tasks_are_split_by_what_they_hold_and_not_by_their_place() -> None:
    def task(n: int, place: int) -> SimpleNamespace:
        def dump(*, mode: str, exclude: set[str], exclude_none: bool) -> dict[str, Any]:
            held = {"prompt": f"task {n}", "idx": place, "task_dir": f"/home/{place}/task-{n}"}
            return {name: value for name, value in held.items() if name not in exclude}

        return SimpleNamespace(n=n, data=SimpleNamespace(model_dump=dump))

    one, other = split_tasks(task(n, n) for n in range(50)), split_tasks(task(n, 99 - n) for n in range(50))
    assert {split: [t.n for t in tasks] for split, tasks in one.items()} == {
        split: [t.n for t in tasks] for split, tasks in other.items()
    }
    assert len(one[Split.TRAIN]) > len(one[Split.TEST]) > 0


@asynccontextmanager
async def gateway(answers: list[int]) -> AsyncIterator[tuple[str, list[str]]]:
    """Answers requests with these statuses in turn, then 200; yields its URL and the keys that it saw."""
    keys: list[str] = []

    async def chat(request: web.Request) -> web.Response:
        keys.append(request.headers["Authorization"])
        status = answers.pop(0) if answers else 200
        return web.json_response({"said": (await request.json())["n"]}, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", keys
    finally:
        await runner.cleanup()


async def test_the_relay_gives_each_rollout_the_key_of_its_episode_and_waits_for_the_gateway() -> None:
    async with gateway([503, 429]) as (url, keys), aiohttp.ClientSession() as client:
        relay = KeyRelay(url)
        async with relay.serving() as base:
            relay.admit("one", "ce_1")
            relay.admit("two", "ce_2")
            for trace_id in ("one", "two"):
                headers = {SESSION_HEADER: trace_id, "Authorization": "Bearer EMPTY"}
                async with client.post(f"{base}/v1/chat/completions", json={"n": trace_id}, headers=headers) as answer:
                    assert (answer.status, await answer.json()) == (200, {"said": trace_id})
            relay.dismiss("one")
            for refused in ({SESSION_HEADER: "one"}, {}):
                async with client.post(f"{base}/v1/chat/completions", json={"n": 1}, headers=refused) as answer:
                    assert answer.status == 401
    assert keys == ["Bearer ce_1"] * 3 + ["Bearer ce_2"]


async def test_the_relay_gives_up_after_a_while_and_passes_refusals_at_once() -> None:
    relay = KeyRelay("http://127.0.0.1:9", patience_seconds=0.2)
    async with gateway([400, 503]) as (url, keys), aiohttp.ClientSession() as client:
        for target, statuses in ((relay, [503]), (KeyRelay(url, patience_seconds=0), [400, 503])):
            async with target.serving() as base, asyncio.timeout(60):
                target.admit("t", "k")
                for status in statuses:
                    headers = {SESSION_HEADER: "t"}
                    async with client.post(f"{base}/v1/chat/completions", json={"n": 1}, headers=headers) as answer:
                        assert answer.status == status
    assert len(keys) == 2


_KILLED = """
import subprocess, sys, time
from pathlib import Path
from clawloop.environments.verifiers.runner import RolloutNotes
with RolloutNotes.open(Path(sys.argv[1])) as notes:
    notes.begun("a"); notes.begun("b"); notes.ended("b")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_worker_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    working = tmp_path / "home" / WORKING_FOLDERS
    for rollout in ("a", "b", "of another"):
        (working / rollout).mkdir(parents=True)
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        program = psutil.Process(int(worker.stdout.readline()))
        try:
            assert sweep_rollouts(tmp_path, tmp_path / "home") == 0
            assert program.is_running()
            worker.kill()
            worker.wait()
            assert sweep_rollouts(tmp_path, tmp_path / "home") == 1
            program.wait(30)
        finally:
            with suppress(psutil.NoSuchProcess):
                program.kill()
            worker.kill()
    assert sorted(path.name for path in working.iterdir()) == ["b", "of another"]
    assert list(tmp_path.glob("clawloop-*")) == []


VARIABLES = {"CLAWLOOP_WORKER_KEY": "key", "TEMPORAL_ADDRESS": "host:7233"}


def options(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("runtime", "image", "program", "why"),
    [
        ("subprocess", "debian:12", None, "its tasks name images, and the runtime `subprocess` has none"),
        ("docker", "debian:12", None, "the runtime is docker, and there is no docker on this machine"),
        ("podman", None, "exit 1", "podman on this machine reaches no daemon: `podman info` fails"),
    ],
)
def test_images_that_could_not_be_had_are_refused_before_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, image: str | None, program: str | None, why: str
) -> None:
    """One that cannot be pulled later is `infrastructure`, like any setup that fails."""
    if program is not None:
        (tmp_path / runtime).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / runtime).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    tasks = [SimpleNamespace(data=SimpleNamespace(image=image))]
    with pytest.raises(SetupError, match=why):
        require_images(runtime, tasks, "sums")
    monkeypatch.undo()
    require_images("subprocess", [SimpleNamespace(data=SimpleNamespace(image=None))], "sums")


def test_an_environment_of_verifiers_is_known_by_its_name(tmp_path: Path) -> None:
    table = tmp_path / "env.toml"
    table.write_text('[env.agent.runtime]\ntype = "docker"\n')
    worker = worker_of(options("--verifiers", "owner/gsm8k@0.3", "--verifiers-config", str(table)), VARIABLES)
    assert worker.verifiers["gsm8k"].taskset == "owner/gsm8k@0.3"
    assert worker.verifiers["gsm8k"].block == {"agent": {"runtime": {"type": "docker"}}}
    assert (worker.temporal, worker.sandboxed) == ("host:7233", {})
    assert "key" not in repr(worker).split("gateway")[0]
    assert set(worker_of(options("--verifiers", "gsm8k", "--name", "sums"), VARIABLES).verifiers) == {"sums"}
    assert set(worker_of(options("--environment", "swe"), VARIABLES).sandboxed) == {"swe"}
    ranged = worker_of(options("--verifiers", "gsm8k", "--reward-range", "-1", "2.5"), VARIABLES)
    assert ranged.verifiers["gsm8k"].reward_range == RewardRange(-1, 2.5)
    with pytest.raises(SetupError, match="--reward-range: 1 to 0 is no range of rewards"):
        worker_of(options("--verifiers", "gsm8k", "--reward-range", "1", "0"), VARIABLES)


def test_each_documented_command_and_table_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    [table] = re.findall(r"```toml\n(.+?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("harbor.toml").write_text(table)
    commands = re.findall(r"^CLAWLOOP_WORKER_KEY=KEY clawloop-environment (.+)$", text, re.MULTILINE)
    parsed = [options(*command.split()) for command in commands]
    [harbor] = [worker_of(one, VARIABLES) for one in parsed if one.verifiers == "harbor"]
    assert harbor.verifiers["harbor"].block["agent"] == {"runtime": {"type": "podman"}}
    assert len(commands) > 2


def test_wrong_options_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[harness]\n")
    for arguments, message in (
        (("--verifiers", "swe"), "already: give another --name"),
        (("--verifiers", "x", "--verifiers-config", str(tmp_path / "wrong.toml")), r"no table \[env\]"),
        (("--verifiers", "x", "--verifiers-config", str(tmp_path / "none.toml")), "cannot be read"),
        (("--verifiers", "x", "--gateway", "ftp://h"), "--gateway must be"),
        (("--tasks", str(tmp_path)), "no task directories"),
    ):
        with pytest.raises(SetupError, match=message):
            worker_of(options(*arguments), VARIABLES)
