"""Terminal tasks: generated ones and Harbor task directories, in real sandboxes, with scripted agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.episodes.kinds import KINDS as KINDS_OF
from clawloop.core.episodes.kinds import ChosenKind
from clawloop.core.errors import RecordUnusable, SetupError
from clawloop.core.ids import new_episode_id
from clawloop.environments.check import Checked
from clawloop.environments.check import check_task as check_played_task
from clawloop.environments.choice import choose, images_of
from clawloop.environments.harbor import BASH, HarborEnvironment, HarborTask, environment_task, read_task
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Split
from clawloop.environments.terminal.environment import (
    KINDS,
    Scenario,
    TerminalEnvironment,
    as_harbor_task,
    generated_task,
)
from clawloop.sandboxes.boxes import Sandboxes
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.scripted_model import bash_call, model
from tests.verbs import clawloop_process

_WON = b"echo $won > /logs/verifier/reward.txt\n"


async def check_task(sandboxes: Sandboxes, task: HarborTask) -> Checked:
    return await check_played_task(sandboxes, environment_task("check", task))


def write_task(folder: Path, task: HarborTask, config: str = "") -> Path:
    """The task as a Harbor task directory."""
    parts = {"environment/files": task.start, "tests": task.tests, "solution": task.solution}
    files = {f"{part}/{path}": content for part, of_part in parts.items() for path, content in of_part.items()}
    files |= {"instruction.md": task.instruction.encode(), "task.toml": f'schema_version = "1.4"\n{config}'.encode()}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_no_task_is_in_both_splits_and_each_is_the_same_each_time() -> None:
    train = [generated_task(Split.TRAIN, number) for number in range(120)]
    test = [generated_task(Split.TEST, number) for number in range(120)]
    assert {task.split for task in train} == {Split.TRAIN}
    assert {task.split for task in test} == {Split.TEST}
    assert train[7] == generated_task(Split.TRAIN, 7)
    assert len({task.instruction for task in train}) > 100
    task = TerminalEnvironment().task("train-3")
    assert "expected.json" not in task.files
    assert "solve.sh" not in task.files
    assert "solve.sh" not in task.tests


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)))
async def test_each_kind_is_solved_by_its_solution_and_by_nothing_else(number: int) -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    checked = await check_task(sandboxes, generated_task(Split.TRAIN, number))
    assert checked == Checked(1.0, 0.0, 0.0, {})
    assert checked.problem is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["join", "move"])
async def test_a_harder_level_asks_for_more_of_the_same_and_all_of_it(kind: str) -> None:
    once, thrice = (generated_task(Split.TRAIN, 5, ChosenKind(kind, level)) for level in (1, 3))
    assert len(thrice.instruction.split(". ")) == 3 * len(once.instruction.split(". "))
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    assert await check_task(sandboxes, thrice) == Checked(1.0, 0.0, 0.0, {})
    a_third = replace(thrice, solution={"solve.sh": thrice.solution["solve.sh"].splitlines()[0]})
    assert (await check_task(sandboxes, a_third)).problem is not None


def test_every_kind_has_every_level() -> None:
    environment = TerminalEnvironment()
    for kind, levels in KINDS_OF["terminal"].items():
        prompts = {environment.task(f"train-5-{kind}-{n}").files["prompt.txt"] for n in range(1, levels.hardest + 1)}
        assert len(prompts) == levels.hardest


async def play(task_id: str, reply: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> tuple[Ending, float | None]:
    async with model(reply, tool="bash") as gateway:
        sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
        runner = SandboxRunner(sandboxes, {"terminal": TerminalEnvironment()}, gateway)
        episode = new_episode_id()
        run = await runner.run_agent("terminal", task_id, episode, "key")
        return run.ending, (await runner.verify("terminal", task_id, episode, run.artifact))[0]


@pytest.mark.slow
async def test_an_agent_that_looks_and_acts_is_right() -> None:
    task = generated_task(Split.TRAIN, 0)  # a copy
    _, source, _, target = task.instruction.rstrip(".").split()
    seen: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] != "tool":
            return bash_call("ls")
        seen.append(messages[-1]["content"])
        return bash_call(f"cp {source} {target}") if len(seen) == 1 else {"content": "Done."}

    assert await play("train-0", reply) == (Ending.COMPLETED, 1.0)
    assert seen == [source, ""]


@pytest.mark.slow
async def test_agents_that_do_nothing_or_never_stop_get_nothing() -> None:
    assert await play("train-0", lambda messages: {"content": "Done."}) == (Ending.COMPLETED, 0.0)
    assert await play("train-0", lambda messages: bash_call("true")) == (Ending.TRUNCATED_TURNS, 0.0)


@pytest.mark.slow
async def test_an_agent_that_forks_until_nothing_can_be_started_fails_by_itself() -> None:
    """Not as one whose gateway is away, which would be tried again."""
    forks = "import os, time\ntry:\n  while os.fork(): pass\n  time.sleep(600)\nexcept OSError: pass"
    answers: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        answers.extend(message["content"] for message in messages[-1:] if message["role"] == "tool")
        if not answers:
            return bash_call(f"python3 -c '{forks}' > /dev/null 2>&1")
        return bash_call("true") if len(answers) == 1 else {"content": "Done."}

    assert await play("train-0", reply) == (Ending.COMPLETED, 0.0)
    assert len(answers) == 2


@pytest.mark.slow
async def test_a_reply_that_is_cut_ends_the_episode() -> None:
    cut = {"content": "I shall", "finish_reason": "length"}
    assert await play("train-0", lambda messages: cut) == (Ending.TRUNCATED_TOKENS, 0.0)


def example() -> HarborTask:
    return as_harbor_task(Scenario("Delete a.txt.", {"a.txt": "x\n"}, {"a.txt": None}, "rm a.txt"))


def test_a_task_directory_is_read(tmp_path: Path) -> None:
    config = "[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 10\n"
    task = read_task(write_task(tmp_path / "delete", example(), config))
    assert (task.instruction, task.start, task.agent_seconds, task.verifier_seconds) == (
        "Delete a.txt.",
        {"a.txt": b"x\n"},
        30.0,
        10.0,
    )
    assert task.tests == example().tests


@pytest.mark.parametrize(
    ("config", "removed", "added", "why"),
    [
        ("", "tests/test.sh", "", "has no tests/test.sh"),
        ("", "solution/solve.sh", "", "has no solution/solve.sh"),
        ("", "instruction.md", "", "instruction.md cannot be read"),
        (
            "",
            "",
            "environment/Dockerfile",
            r"needs an image that is not built here \(Dockerfile\): build it and name it",
        ),
        ("", "", "environment/docker-compose.yaml", "needs several containers"),
        ('[environment]\ndocker_image = "--help"', "", "", "docker_image: '--help' is no name of an image"),
        ("[agent]\ntimeout_sec = 0", "", "", "agent.timeout_sec: must be a number of seconds"),
        ("[agent]\ntimeout_sec = 14401", "", "", "agent.timeout_sec: must be a number of seconds up to 14400"),
        ("[verifier]\ntimeout_sec = 14401", "", "", "verifier.timeout_sec: must be a number of seconds up to 14400"),
        ("agent = 1", "", "", "agent: must be a table"),
        ("[", "", "", "task.toml cannot be read"),
    ],
)
def test_an_unusable_directory_is_refused_with_the_remedy(
    tmp_path: Path, config: str, removed: str, added: str, why: str
) -> None:
    folder = write_task(tmp_path / "task", example(), config)
    if removed:
        (folder / removed).unlink()
    if added:
        (folder / added).write_text("FROM debian\n")
    with pytest.raises(SetupError, match=why):
        read_task(folder)


def test_a_task_may_say_that_a_shell_is_enough(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", example(), '[environment]\nsandbox = "host"')
    (folder / "environment" / "Dockerfile").write_text("FROM debian\n")
    assert read_task(folder).instruction == "Delete a.txt."


def test_a_task_may_name_an_image(tmp_path: Path) -> None:
    """As Harbor does, it takes the image that is named instead of the Dockerfile beside it."""
    folder = write_task(tmp_path / "tasks" / "one", example(), '[environment]\ndocker_image = "debian:12"')
    (folder / "environment" / "Dockerfile").write_text("FROM debian\n")
    task = read_task(folder)
    assert environment_task("train-0", task).image == "debian:12"
    assert images_of([HarborEnvironment("tasks", [task]), HarborEnvironment("more", [example()])]) == {"debian:12"}


def test_a_folder_of_tasks_is_an_environment_of_its_name(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path / "files" / f"task-{number}", generated_task(Split.TRAIN, number))
    environments = choose([], [tmp_path / "files"])
    assert environments.keys() == {"files"}
    environment = environments["files"]
    assert environment.task("train-0") != environment.task("train-1")
    assert environment.task("train-0").files == environment.task("train-12").files
    assert json.loads(environment.task("train-5").files["harness.json"])["tool"] == BASH.tool
    with pytest.raises(RecordUnusable, match="no test task"):
        environment.task("test-0")
    with pytest.raises(SetupError, match="has no task directories"):
        HarborEnvironment.read(tmp_path / "none")
    with pytest.raises(SetupError, match="already"):
        choose(["tool-call"], [write_task(tmp_path / "tool-call" / "task", generated_task(Split.TRAIN, 0)).parent])


@pytest.mark.slow
async def test_tasks_that_reward_nothing_or_cheats_or_not_their_solution_are_refused() -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    always = HarborTask("x", {}, {"test.sh": b"echo 1 > /logs/verifier/reward.txt"}, {"solve.sh": b""})
    never = HarborTask("x", {}, {"test.sh": b"echo 0 > /logs/verifier/reward.txt"}, {"solve.sh": b""})
    silent = HarborTask("x", {}, {"test.sh": b"true"}, {"solve.sh": b""})
    believes = HarborTask("x", {}, {"test.sh": b"bash ./test.sh; cp reward.txt /logs/verifier/"}, {"solve.sh": b""})
    problems = [(await check_task(sandboxes, task)).problem for task in (always, never, silent, believes)]
    assert problems[0] == "nothing has the reward 1, and must have 0"
    assert problems[1] == "oracle has the reward 0, and must have 1"
    assert problems[2] == "oracle has no reward: the verifier wrote neither reward.txt nor reward.json"
    assert problems[3] is not None


@pytest.mark.slow
async def test_a_verifier_may_write_named_rewards_and_what_the_agent_left_under_the_name_is_none() -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    script = b"""
        [ -e done ] && won=1 || won=0
        echo '{"reward": '$won', "speed": 3.5}' > /logs/verifier/reward.json
    """
    named = HarborTask("x", {}, {"test.sh": script}, {"solve.sh": b"touch done"})
    assert (await check_task(sandboxes, named)).problem is None
    both = script + b"echo 1 > /logs/verifier/reward.txt"
    checked = await check_task(sandboxes, HarborTask("x", {}, {"test.sh": both}, {"solve.sh": b"touch done"}))
    assert checked.problem == "nothing has no reward: the verifier wrote two rewards: 0 and 1"
    believes = HarborTask("x", {}, {"test.sh": b"cp reward.json /logs/verifier/ || true"}, {"solve.sh": b""})
    silent = "oracle has no reward: the verifier wrote neither reward.txt nor reward.json"
    assert (await check_task(sandboxes, believes)).problem == silent


@pytest.mark.slow
async def test_files_of_a_task_directory_that_can_be_run_can_be_run_in_sandboxes(tmp_path: Path) -> None:
    task = HarborTask(
        "Run tools/do.",
        start={"tools/do": b"#!/bin/sh\necho done > done\n", "tools/text": b""},
        tests={"test.sh": b"/tests/more/check", "more/check": b"#!/bin/sh\n[ -x done ] && won=1 || won=0\n" + _WON},
        solution={"solve.sh": b"/solution/act", "act": b"#!/bin/sh\ntools/do; chmod +x done\n"},
    )
    folder = write_task(tmp_path / "task", task)
    for path in ("environment/files/tools/do", "tests/more/check", "solution/act"):
        (folder / path).chmod(0o755)
    read = read_task(folder)
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    assert await check_task(sandboxes, read) == Checked(1.0, 0.0, 0.0, {})
    made, again = environment_task("train-0", read), environment_task("train-0", read_task(folder))
    assert (made.start, made.executable_tests) == (again.start, {"more/check"})


@pytest.mark.slow
def test_the_verb_checks_directories_and_says_which_are_unusable(tmp_path: Path) -> None:
    write_task(tmp_path / "good", example())
    broken = write_task(tmp_path / "broken", example())
    (broken / "solution" / "solve.sh").write_text("true\n")
    done = clawloop_process("environment", "check", str(tmp_path), "--json")
    assert done.returncode == 1
    assert [(row["usable"], row["rewards"], row["why"]) for row in json.loads(done.stdout)] == [
        ("no", "0, 0, 0", "oracle has the reward 0, and must have 1"),
        ("yes", "1, 0, 0", ""),
    ]
    assert clawloop_process("environment", "check", str(tmp_path / "good")).returncode == 0
    assert "no task directory" in clawloop_process("environment", "check", str(tmp_path / "none")).stderr
