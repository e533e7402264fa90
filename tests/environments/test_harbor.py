"""Harbor's task.toml: each key is honoured, changes nothing, or is refused by name; and no task is played unchecked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.errors import SetupError, TaskUnusable
from clawloop.core.ids import new_episode_id
from clawloop.environments.check import AGAIN_SECONDS, Checked, CheckedTasks, check_task
from clawloop.environments.choice import allowed_variables
from clawloop.environments.harbor import HarborEnvironment, environment_task, read_task
from clawloop.environments.playing import Actor, packed, play
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Split
from clawloop.sandboxes.boxes import BoxResult, BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.scripted_model import bash_call, model
from tests.verbs import clawloop, clawloop_process, refusal

HOST = '[environment]\nsandbox = "host"\n'
ILL = f'{HOST}healthcheck = {{command = "false"}}\n'
RIGHT = Checked(1.0, 0.0, 0.0, {})
TEST = '[ "$(cat /app/answer.txt 2>/dev/null)" = "42" ] && won=1 || won=0; echo $won > /logs/verifier/reward.txt'
SOLVE = "echo 42 > /app/answer.txt"
# What Harbor 0.26 knows, with a value that says something: what becomes of it here.
KEYS: Mapping[str, tuple[str, str | None]] = {
    "schema_version": ('"1.4"', None),
    "version": ('"1.0"', None),
    "source": ('"x"', None),
    "task": ('{name = "a/b", version = "1", description = "", authors = [{name = "A"}], keywords = ["k"]}', None),
    "metadata": ('{difficulty = "easy", any = {thing = 1}, reward_range = [-1, 3]}', None),
    "artifacts": ('["/app/a", {source = "b", destination = "c", exclude = ["d"], service = "main"}]', None),
    "multi_step_reward_strategy": ('"mean"', None),
    "agent.timeout_sec": ("60", None),
    "agent.user": ('"someone"', "agent.user: a sandbox has one user"),
    "agent.network_mode": ('"public"', None),
    "agent.allowed_hosts": ('["x.org"]', "agent.allowed_hosts: sandboxes reach the gateway alone"),
    "verifier.timeout_sec": ("60.5", None),
    "verifier.env": ('{A = "b"}', None),
    "verifier.user": ("1000", "verifier.user: a sandbox has one user"),
    "verifier.network_mode": ('"allowlist"', "verifier.network_mode: sandboxes reach the gateway alone"),
    "verifier.allowed_hosts": ('["x.org"]', "verifier.allowed_hosts: sandboxes reach"),
    "verifier.environment_mode": ('"separate"', "artifacts.exclude is not honoured with verifier.environment_mode"),
    "verifier.environment": (
        '{docker_image = "debian"}',
        "verifier.environment: the verifier's sandbox is of the task's",
    ),
    "verifier.collect": ('[{command = "x"}]', "verifier.collect: no command runs between"),
    "solution.env": ('{A = "b"}', None),
    "environment.build_timeout_sec": ("600.0", None),
    "environment.docker_image": ('"debian:12"', None),
    "environment.os": ('"Windows"', "environment.os: Input should be 'linux'"),
    "environment.cpus": ("2", None),
    "environment.memory_mb": ("2048", None),
    "environment.memory": ('"2G"', None),
    "environment.storage_mb": ("10240", None),
    "environment.storage": ('"10G"', None),
    "environment.gpus": ("1", "environment.gpus: sandboxes have no GPU"),
    "environment.gpu_types": ('["H100"]', None),
    "environment.tpu": ('{type = "v6e", topology = "2x4"}', "environment.tpu: sandboxes have no TPU"),
    "environment.mcp_servers": ('[{name = "x", url = "http://x"}]', "environment.mcp_servers: a sandbox reaches"),
    "environment.env": ('{A = "b"}', None),
    "environment.skills_dir": ('"/skills"', "environment.skills_dir: our agent loop has no skills"),
    "environment.healthcheck": ('{command = "true", retries = 2}', None),
    "environment.workdir": ('"/app"', None),
    "environment.network_mode": ('"no-network"', None),
    "environment.allowed_hosts": ('["x.org"]', "environment.allowed_hosts: sandboxes reach"),
    "environment.allow_internet": ("true", None),
    "steps": ('[{name = "one"}]', "steps/one/instruction.md cannot be read"),
}


def write(folder: Path, toml: str = HOST, **files: str) -> Path:
    """A task whose solution is right, with files in place of its own, by their paths."""
    found = {"instruction.md": "Write 42 into /app/answer.txt", "solution/solve.sh": SOLVE, "tests/test.sh": TEST}
    found |= {"task.toml": toml} | files
    for name, content in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


async def checked(folder: Path, variables: Mapping[str, str] | None = None) -> Checked:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    return await check_task(sandboxes, environment_task("check", read_task(folder), variables=variables))


@pytest.mark.parametrize("key", KEYS)
def test_each_key_of_harbors_schema_is_taken_or_refused_by_name(tmp_path: Path, key: str) -> None:
    value, refusal = KEYS[key]
    # Without an artifact of its own each mode of verifiers is taken.
    excluded = 'artifacts = [{source = "a", exclude = ["b"]}]\n' if key == "verifier.environment_mode" else ""
    folder = write(tmp_path / "task", f"{excluded}{key} = {value}\n")
    if refusal is None:
        read_task(folder)
    else:
        with pytest.raises(SetupError, match=refusal) as refused:
            read_task(folder)
        assert str(folder) in str(refused.value) or key.startswith("verifier.environment_mode")


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[verifier]\ntimeout = 60", "verifier.timeout: Harbor's schema 1.4 has no such key: correct or remove it"),
        ("[oracle]\nx = 1", "oracle: Harbor's schema 1.4 has no such key"),
        ('schema_version = "2.0"', "schema_version: "),
        ("[verifier]\nenv = {A = 1}", "verifier.env.A: Input should be a valid string"),
        ('[environment]\nworkdir = "app"', "environment.workdir: must be an absolute path"),
        ('[environment]\nmemory = "much"', "environment.memory: must be a size such as 512M"),
        ('[[steps]]\nname = "../x"', "steps.0.name: must be the name of one folder"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "steps: two steps have the same name"),
        ("[metadata]\nreward_range = [1, 0]", "metadata: reward_range must be two numbers"),
        ("[metadata]\nreward_range = 5", "metadata: reward_range must be two numbers"),
        ('[[steps]]\nname = "a"\nmin_reward = {speed = 1}', "steps.0.min_reward: only the reward named `reward`"),
        ('artifacts = ["../x"]', "artifacts.0.source: must not contain"),
    ],
)
def test_what_is_wrong_in_it_is_named(tmp_path: Path, toml: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        read_task(write(tmp_path / "task", toml))


@pytest.mark.parametrize("name", ["trajectory.json", "tests/.harborignore", "tests/Dockerfile"])
def test_files_that_would_change_what_is_asked_or_checked_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match=name):
        read_task(write(tmp_path / "task", "", **{name: "x"}))


def test_a_mark_against_training_on_the_data_is_not_part_of_what_is_asked(tmp_path: Path) -> None:
    mark = "<!-- harbor-canary GUID 1 -->\n# another canary\n\n"
    folder = write(tmp_path / "task", **{"instruction.md": f"{mark}Say canary.\n"})
    assert read_task(folder).instruction == "Say canary.\n"


@pytest.mark.slow
async def test_variables_reach_who_they_are_for_and_no_other(tmp_path: Path) -> None:
    toml = """
        [verifier.env]
        EXPECTED = "42"
        [solution.env]
        WRITTEN = "${SECRET:-41}"
        [environment]
        sandbox = "host"
        [environment.env]
        TARGET = "/app/answer.txt"
    """
    test = '[ -z "$WRITTEN" ] && [ "$(cat $TARGET 2>/dev/null)" = "$EXPECTED" ] && won=1 || won=0'
    test += "; echo $won > /logs/verifier/reward.txt"
    solve = '[ -z "$EXPECTED" ] && echo $WRITTEN > $TARGET'
    folder = write(tmp_path / "task", toml, **{"tests/test.sh": test, "solution/solve.sh": solve})
    assert await checked(folder, {"SECRET": "42"}) == RIGHT
    assert (await checked(folder)).oracle == 0.0


def test_a_task_gets_no_variable_of_the_worker_that_was_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "42")
    read = read_task(write(tmp_path / "task", '[environment.env]\nA = "${SECRET}"\nB = "${DATABASE_URL:-none}"'))
    with pytest.raises(
        TaskUnusable, match=r"environment.env.A asks for the worker's variable SECRET: .*--variable SECRET"
    ):
        environment_task("train-0", read)
    made = environment_task("train-0", read, variables=allowed_variables(["SECRET"]))
    assert made.environment == {"A": "42", "B": "none"}
    with pytest.raises(SetupError, match="--variable NOBODYS: there is no such variable"):
        allowed_variables(["NOBODYS"])


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["/workspace/deep", "/app", "/app/inner", "/root"])
async def test_commands_run_in_the_folder_that_the_task_names(tmp_path: Path, workdir: str) -> None:
    test = f'[ "$PWD" = {workdir} ] && [ "$(cat {workdir}/answer.txt answer.txt)" = "42\n42" ] && won=1 || won=0'
    folder = write(
        tmp_path / "task",
        f'{HOST}workdir = "{workdir}"\n',
        **{
            "tests/test.sh": f"{test}; echo $won > /logs/verifier/reward.txt",
            "solution/solve.sh": f'[ "$PWD" = {workdir} ] && echo 42 > answer.txt',
        },
    )
    assert await checked(folder) == RIGHT


@pytest.mark.slow
async def test_a_working_folder_where_the_sandbox_has_other_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskUnusable, match="the working folder cannot be /tests/x"):
        await checked(write(tmp_path / "task", f'{HOST}workdir = "/tests/x"\n'))


@pytest.mark.slow
async def test_a_separate_verifier_finds_the_tasks_own_files_and_the_artifacts_alone(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/answer.txt", "kept"]\n[verifier]\nenvironment_mode = "separate"\n' + HOST
    test = (
        '[ "$(cat /app/answer.txt /app/kept/a /app/given 2>/dev/null)" = "42\n1\nx" ] && [ ! -e /app/other ] '
        "&& won=1 || won=0; echo $won > /logs/verifier/reward.txt"
    )
    files = {
        "tests/test.sh": test,
        "solution/solve.sh": "mkdir kept; echo 1 > kept/a; echo 42 > answer.txt; touch other; echo y > given",
        "environment/files/given": "x\n",
    }
    assert await checked(write(tmp_path / "task", toml, **files)) == RIGHT
    shared = write(tmp_path / "shared", toml.replace("separate", "shared"), **files)
    assert (await checked(shared)).oracle == 0.0


@pytest.mark.slow
async def test_the_memory_that_a_task_asks_for_is_its_limit(tmp_path: Path) -> None:
    solve = "python3 -c 'x = bytearray(700 << 20)' && echo 42 > /app/answer.txt"
    for asked, oracle in ((2048, 1.0), (512, 0.0)):
        toml = f"{HOST}memory_mb = {asked}\n"
        folder = write(tmp_path / str(asked), toml, **{"solution/solve.sh": solve})
        assert (await checked(folder)).oracle == oracle


STEPS = """
    {strategy}
    [environment]
    sandbox = "host"
    [[steps]]
    name = "write"
    {least}
    [[steps]]
    name = "copy"
    [steps.verifier.env]
    EXPECTED = "42"
"""
STEP_FILES = {
    "tests/test.sh": "exit 1",  # each step has its own, which lies over this
    "tests/given.sh": "reward() { echo $1 > /logs/verifier/reward.txt; }",
    "steps/write/instruction.md": "Write 42 into answer.txt.",
    "steps/write/tests/test.sh": ". /tests/given.sh; grep -qs 42 /app/answer.txt && reward 1 || reward 0",
    "steps/copy/instruction.md": "Copy it to copy.txt.",
    "steps/copy/workdir/setup.sh": 'echo ready > found; rm "$0"',
    "steps/copy/solution/solve.sh": "cp answer.txt copy.txt",
    "steps/copy/tests/test.sh": (
        ". /tests/given.sh; [ -e /app/setup.sh ] && exit 1\n"
        '[ "$(cat /app/found /app/copy.txt 2>/dev/null)" = "ready\n$EXPECTED" ] && reward 1 || reward 0'
    ),
}


def steps(folder: Path, strategy: str = "", least: str = "", **files: str) -> Path:
    return write(folder, STEPS.format(strategy=strategy, least=least), **(STEP_FILES | files))


@pytest.mark.slow
async def test_steps_follow_each_other_in_the_same_files(tmp_path: Path) -> None:
    assert await checked(steps(tmp_path / "task")) == RIGHT


@pytest.mark.slow
async def test_a_step_whose_setup_or_health_fails_gives_no_reward(tmp_path: Path) -> None:
    broken = await checked(steps(tmp_path / "setup", **{"steps/copy/workdir/setup.sh": "exit 3"}))
    assert broken.problem == "oracle has no reward: step copy: its setup.sh failed"
    ill = 'healthcheck = {command = "test -e answer.txt", retries = 2, interval_sec = 0.1}'
    unhealthy = await checked(steps(tmp_path / "health", least=ill))
    assert unhealthy.problem == "oracle has no reward: step write: its healthcheck failed"
    assert (await checked(write(tmp_path / "well", f'{HOST}healthcheck = {{command = "true"}}\n'))) == RIGHT


def test_steps_that_are_incomplete_or_take_too_long_are_refused(tmp_path: Path) -> None:
    folder = steps(tmp_path / "task")
    (folder / "steps" / "copy" / "instruction.md").unlink()
    with pytest.raises(SetupError, match=r"steps/copy/instruction\.md cannot be read"):
        read_task(folder)
    long = steps(tmp_path / "long", least="agent = {timeout_sec = 14000}")
    with pytest.raises(SetupError, match="all steps with their verifiers may take"):
        read_task(long)


async def played(folder: Path, replies: Mapping[str, list[str]]) -> tuple[Any, list[str]]:
    """What becomes of an episode, and what was asked, where the model answers each instruction by these commands."""
    asked: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        instruction = messages[0]["content"]
        said = sum(message["role"] == "assistant" for message in messages)
        if not said:
            asked.append(instruction)
        commands = next(commands for words, commands in replies.items() if words in instruction)
        return bash_call(commands[said]) if said < len(commands) else {"content": "Done."}

    async with model(reply, tool="bash") as gateway:
        sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
        environment = HarborEnvironment("steps", [read_task(folder)])
        [split] = [split for split in Split if read_task(folder).split is split]
        runner = SandboxRunner(sandboxes, {"steps": environment}, gateway)
        return await runner.run_agent("steps", f"{split}-0", new_episode_id(), "key"), asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "least", "verdict", "count"),
    [
        ("", "", (0.5, ""), 2),
        ('multi_step_reward_strategy = "final"', "", (0.0, ""), 2),
        ('multi_step_reward_strategy = "final"', "min_reward = 1.0", (0.0, ""), 2),
    ],
)
async def test_an_episode_of_steps_is_rewarded_for_all_of_them(
    tmp_path: Path, strategy: str, least: str, verdict: tuple[float, str], count: int
) -> None:
    run, asked = await played(
        steps(tmp_path / "task", strategy, least), {"Write": ["echo 42 > answer.txt"], "Copy": []}
    )
    assert (run.ending, run.verdict, len(asked)) == (Ending.COMPLETED, verdict, count)


@pytest.mark.slow
async def test_no_step_follows_one_whose_reward_is_too_low(tmp_path: Path) -> None:
    run, asked = await played(steps(tmp_path / "task", least="min_reward = 1"), {"Write": ["echo 41 > answer.txt"]})
    assert (run.verdict, asked) == ((0.0, ""), ["Write 42 into answer.txt."])


@pytest.mark.parametrize(("toml", "verdict"), [(ILL, (None, "its healthcheck failed")), (HOST, None)])
async def test_an_episode_whose_healthcheck_failed_has_no_reward(
    tmp_path: Path, toml: str, verdict: tuple[None, str] | None
) -> None:
    class Ended:
        async def run(self, task: BoxTask) -> BoxResult:
            return BoxResult(96, b"", b"", None)

    task = read_task(write(tmp_path / "task", toml))
    runner = SandboxRunner(Ended(), {"files": HarborEnvironment("files", [task])}, ("127.0.0.1", 9))
    run = await runner.run_agent("files", f"{task.split}-0", new_episode_id(), "key")
    assert run.verdict == verdict


class CountedSandboxes:
    """Bubblewrap that counts what it ran, by the beginning of its name."""

    def __init__(self, inner: Bubblewrap) -> None:
        self._inner = inner
        self.names: list[str] = []

    async def run(self, task: BoxTask) -> BoxResult:
        self.names.append(task.name)
        return await self._inner.run(task)


@pytest.mark.slow
async def test_a_worker_checks_a_task_once_and_plays_none_that_fails(tmp_path: Path) -> None:
    good, free = read_task(write(tmp_path / "good")), read_task(write(tmp_path / "free", **{"tests/test.sh": "exit 0"}))
    sandboxes = CountedSandboxes(await asyncio.to_thread(Bubblewrap.find, BoxFolders()))
    environment = HarborEnvironment("files", [good, free])
    runner = SandboxRunner(sandboxes, {"files": environment}, ("127.0.0.1", 9))
    [split] = {good.split, free.split}
    await asyncio.gather(*(runner.require_usable("files", f"{split}-0") for _ in range(3)))
    assert len(sandboxes.names) == 6
    for _ in range(2):
        why = "the task is not played: oracle has no reward: the verifier wrote neither reward.txt nor reward.json"
        with pytest.raises(TaskUnusable, match=why):
            await runner.require_usable("files", f"{split}-1")
    assert len(sandboxes.names) == 12


class ScriptedSandboxes:
    """Sandboxes in which nothing runs: verifiers find the next of these rewards; None: they did not end in time."""

    def __init__(self, rewards: list[float | None]) -> None:
        self.rewards = rewards

    async def run(self, task: BoxTask) -> BoxResult:
        if not task.name.startswith("verify-"):
            return BoxResult(0, b"", b"", None)
        reward = self.rewards.pop(0)
        if reward is None:
            return BoxResult(None, b"", b"", None)
        return BoxResult(0, b"", packed({"reward.txt": str(reward).encode()}), None)


async def test_a_check_that_a_slow_machine_failed_is_made_again_later(tmp_path: Path) -> None:
    task = replace(environment_task("check", read_task(write(tmp_path / "task"))), digest="d")
    now = [0.0]
    sandboxes = ScriptedSandboxes([None, 0, 0, 1, 0, 0])
    tasks = CheckedTasks(sandboxes, clock=lambda: now[0])
    for _ in range(3):  # as many episodes as wait for it
        with pytest.raises(TaskUnusable, match="oracle has no reward: the verifier did not end in"):
            await tasks.require_usable(task)
    assert len(sandboxes.rewards) == 3
    now[0] = AGAIN_SECONDS[0]
    for _ in range(2):
        await tasks.require_usable(task)
    assert sandboxes.rewards == []


async def test_a_check_is_made_again_so_often_and_no_more(tmp_path: Path) -> None:
    task = replace(environment_task("check", read_task(write(tmp_path / "task"))), digest="d")
    now = [0.0]
    sandboxes = ScriptedSandboxes([None] * 99)
    tasks = CheckedTasks(sandboxes, clock=lambda: now[0])
    for _ in range(9):
        with pytest.raises(TaskUnusable):
            await tasks.require_usable(task)
        now[0] += max(AGAIN_SECONDS)
    assert 99 - len(sandboxes.rewards) == 3 * (1 + len(AGAIN_SECONDS))


@pytest.mark.parametrize("rewards", [[0, 0, 0], [1, 1, 0], [1, 0, 1], [None, 1, 0], [1, None, 1]])
async def test_a_reward_that_is_wrong_stands(tmp_path: Path, rewards: list[float | None]) -> None:
    task = replace(environment_task("check", read_task(write(tmp_path / "task"))), digest="d")
    now = [0.0]
    tasks = CheckedTasks(ScriptedSandboxes(rewards), clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(TaskUnusable):
            await tasks.require_usable(task)
        now[0] += max(AGAIN_SECONDS)


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_an_agent_never_sees_the_variables_of_its_verifier(tmp_path: Path, mode: str) -> None:
    """Nor those of the solution, wherever a process of its sandbox keeps them."""
    toml = f'''artifacts = ["seen"]
[verifier]
environment_mode = "{mode}"
[verifier.env]
EXPECTED = "of-the-verifier"
[solution.env]
SOLVES = "of-the-solution"
{HOST}'''
    test = 'grep -q "$EXPECTED" seen && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
    task = environment_task("check", read_task(write(tmp_path / "task", toml, **{"tests/test.sh": test})))
    looks = (
        "env > seen; cat /proc/*/environ /proc/*/cmdline >> seen;"
        " grep -rs of-the- /work /app /logs /tmp /tests /solution >> seen; true"
    )
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    played = await play(sandboxes, "look", task, lambda _: Actor(("bash", "-c", looks)))
    assert (played.reward, played.reason) == (0.0, "")
    told = await play(sandboxes, "told", task, lambda _: Actor(("bash", "-c", "echo of-the-verifier > seen")))
    assert told.reward == 1.0


def test_a_folder_is_used_without_the_tasks_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        write(tmp_path / f"good-{number}", **{"instruction.md": f"Write {number}."})
    write(tmp_path / "bad", f"{HOST}gpus = 1\n")
    environment = HarborEnvironment.read(tmp_path)
    assert environment.task("train-0").digest is not None
    assert "environment.gpus: sandboxes have no GPU" in str([vars(record) for record in caplog.records])
    only = write(tmp_path / "only" / "bad", f"{HOST}gpus = 1\n").parent
    with pytest.raises(SetupError, match=r"none of its 1 tasks can be used: .*environment\.gpus"):
        HarborEnvironment.read(only)


def test_starting_rollouts_of_a_folder_says_which_tasks_cannot_be_used(tmp_path: Path) -> None:
    nothing = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "CLAWLOOP_DATA": str(tmp_path / "data")}
    tasks = write(tmp_path / "tasks" / "bad", f"{HOST}gpus = 1\n").parent
    refused = refusal(clawloop("rollouts", "start", "--environment", str(tasks), **nothing))
    assert f"{tasks}: none of its 1 tasks can be used: " in refused
    assert "environment.gpus: sandboxes have no GPU" in refused
    assert "has no task directories" in refusal(
        clawloop("rollouts", "start", "--environment", str(tmp_path), **nothing)
    )
    for number in range(8):
        write(tasks / f"good-{number}", **{"instruction.md": f"Write {number}."})
    left_out, counted, _ = clawloop("rollouts", "start", "--environment", str(tasks), **nothing).stderr.splitlines()
    assert left_out.startswith("left out: ")
    assert "environment.gpus: sandboxes have no GPU" in left_out
    assert counted == "8 of 9 tasks can be read"


@pytest.mark.slow
def test_the_verb_counts_the_tasks_that_can_be_used(tmp_path: Path) -> None:
    write(tmp_path / "good", f'{HOST}[verifier.env]\nA = "${{HOME_OF_TESTS}}"\n')
    write(tmp_path / "bad", f"{HOST}gpus = 1\n")
    done = clawloop_process("environment", "check", str(tmp_path), COLUMNS="40")
    assert "0 of 2 tasks can be used" in done.stdout
    assert "--variable HOME_OF_TESTS" in done.stdout
    again = clawloop_process(
        "environment", "check", str(tmp_path), "--json", "--variable", "HOME_OF_TESTS", HOME_OF_TESTS="x"
    )
    assert [row["usable"] for row in json.loads(again.stdout)] == ["no", "yes"]
