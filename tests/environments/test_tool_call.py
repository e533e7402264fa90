"""The environment tool-call: its tasks, and whole episodes in real sandboxes with a scripted model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clawloop.core.contracts.episodes import Ending
from clawloop.core.episodes.kinds import KINDS, ChosenKind
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import new_episode_id
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.inside import harness
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import EnvironmentTask, Split, split_of
from clawloop.environments.tool_call.environment import ToolCallEnvironment, question
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.scripted_model import Reply, model, python_call

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
        ("true", "echo -1e6 > reward.txt", Ending.COMPLETED, -1e6, ""),
        (
            "true",
            "echo 1e308 > reward.txt",
            Ending.COMPLETED,
            None,
            "the verifier's reward 1e+308 is not between -1e+06 and 1e+06",
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
