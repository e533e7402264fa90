"""Harbor task directories, read without Harbor: task.toml, instruction.md, environment/, tests/ and solution/.

A task runs in our own sandbox, which has the host's /usr, or the image that `docker_image` names. Files of
`environment/files` lie in /work, which is also /app, or in the image's working folder; `tests/test.sh` writes the
reward to /logs/verifier, as reward.txt or reward.json. A task whose image would have to be built is refused.
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawloop.environments.agent import HARNESS, AgentLoop, CommandHarness
from clawloop.environments.reward import packed
from clawloop.environments.task import EnvironmentTask, Split, parse_task_id, split_of
from clawloop.episodes.limits import LONGEST_SECONDS
from clawloop.errors import EpisodeUnusable, SetupError
from clawloop.sandboxes.images import image_name

# Harbor's own defaults are ten minutes; commands of a small model take seconds.
AGENT_SECONDS = 900.0
VERIFIER_SECONDS = 120.0
_FILE_BYTES = 8 * 1024 * 1024
# Folders of a task directory whose files reach sandboxes.
START, TESTS, SOLUTION = "environment/files", "tests", "solution"
BASH = AgentLoop(
    tool={
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command in the working folder; returns what it prints.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
    argument="command",
    program=("bash", "-c"),
    folder=".",  # where the harness starts: /work, or the working folder of the task's image
    turns=20,
    seconds=30.0,
    max_tokens=1024,
    answer=None,
)
# The reward of test.sh alone: what the agent left under its names goes first, and its files go before the reward is
# copied, so that nothing else is handed back.
_VERIFY = """
work=$PWD; rm -rf reward.txt reward.json; mkdir -p /tmp/logs /tmp/home; mkdir -p /logs/verifier
bash /tests/test.sh
cd /; find "$work" -mindepth 1 -delete
for name in reward.txt reward.json; do
    if [ -e /logs/verifier/$name ]; then cp /logs/verifier/$name "$work/$name" || exit 1; fi
done
"""
# Python of the verifier must not load what the agent left in its home.
_VERIFIER_VARIABLES = {"HOME": "/tmp/home", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True, slots=True)
class HarborTask:
    """
    Args:
        start: files in /work at the beginning, by path.
        tests, solution: files of these folders.
        image: None: the host's /usr is enough.
        executable: files of all three that can be run, by their path in the task directory.
    """

    instruction: str
    start: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    solution: Mapping[str, bytes]
    agent_seconds: float = AGENT_SECONDS
    verifier_seconds: float = VERIFIER_SECONDS
    image: str | None = None
    executable: Collection[str] = ()

    def executable_in(self, part: str) -> frozenset[str]:
        """Files of one of the folders that can be run, by their path in it."""
        return frozenset(path.removeprefix(f"{part}/") for path in self.executable if path.startswith(f"{part}/"))

    @property
    def split(self) -> Split:
        """By a hash of what is asked and what is there, so that no task is ever in both."""
        content = [self.instruction, *(f"{path} {self.start[path]!r}" for path in sorted(self.start))]
        return split_of("\n".join(content))


def environment_task(task_id: str, task: HarborTask, harness: CommandHarness | None = None) -> EnvironmentTask:
    """
    Args:
        harness: who plays; None: our agent loop around a shell.
    """
    return EnvironmentTask(
        id=task_id,
        files=BASH.files(task.instruction),
        harness=HARNESS if harness is None else ("bash", "-c", harness.command),
        folders={} if harness is None else harness.folders,
        tests=task.tests,
        verifier=("bash", "-c", _VERIFY),
        seconds=task.agent_seconds,
        verifier_seconds=task.verifier_seconds,
        start=packed(task.start, task.executable_in(START)),
        artifact_at="/work",
        verifier_environment=_VERIFIER_VARIABLES,
        image=task.image,
        executable_tests=task.executable_in(TESTS),
    )


class HarborEnvironment:
    """Satisfies `clawloop.environments.task.Environment`: the task directories of a folder.

    Task `train-N` is the N-th of the training tasks, and after the last the first again; `test-N` likewise.
    """

    def __init__(self, name: str, tasks: Sequence[HarborTask], harness: CommandHarness | None = None) -> None:
        self.name = name
        self._harness = harness
        self._tasks = {split: [task for task in tasks if task.split is split] for split in Split}

    @classmethod
    def read(cls, folder: Path, harness: CommandHarness | None = None) -> HarborEnvironment:
        """
        Raises:
            SetupError: the folder has no tasks, or one is unusable.
        """
        try:
            found = sorted(path.parent for path in folder.glob("*/task.toml"))
        except OSError as error:
            raise SetupError(f"{folder} cannot be read: {error.strerror}") from error
        if not found:
            raise SetupError(f"{folder} has no task directories: each needs a task.toml")
        environment = cls(folder.resolve().name, [read_task(path) for path in found], harness)
        if not environment._tasks[Split.TRAIN]:
            raise SetupError(
                f"{folder}: all its tasks are held out by their hash, none is left to practise on: add some"
            )
        return environment

    @property
    def images(self) -> set[str]:
        """Images that its tasks name."""
        return {task.image for tasks in self._tasks.values() for task in tasks if task.image is not None}

    def task(self, task_id: str) -> EnvironmentTask:
        split, number = parse_task_id(task_id)
        tasks = self._tasks[split]
        if not tasks:
            raise EpisodeUnusable(f"{self.name} has no {split} task")
        return environment_task(task_id, tasks[number % len(tasks)], self._harness)


def read_task(folder: Path) -> HarborTask:
    """
    Raises:
        SetupError: a file is missing or wrong, or an image would have to be built; names the file and the remedy.
    """
    config = _config(folder / "task.toml")
    environment = _table(config, "environment", folder)
    image = _image(folder, environment)
    tests, solution = _files(folder / TESTS), _files(folder / SOLUTION)
    for place, files, name in ((TESTS, tests, "test.sh"), (SOLUTION, solution, "solve.sh")):
        if name not in files:
            raise SetupError(f"{folder} has no {place}/{name}")
    instruction = folder / "instruction.md"
    try:
        text = instruction.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{instruction} cannot be read: {error}") from error
    return HarborTask(
        instruction=text,
        start=_files(folder / START),
        tests=tests,
        solution=solution,
        agent_seconds=_seconds(config, "agent", folder, AGENT_SECONDS),
        verifier_seconds=_seconds(config, "verifier", folder, VERIFIER_SECONDS),
        image=image,
        executable=frozenset(path for part in (START, TESTS, SOLUTION) for path in _executable(folder, part)),
    )


def _image(folder: Path, environment: Mapping[str, Any]) -> str | None:
    """`docker_image`, which Harbor uses instead of building the Dockerfile beside it."""
    if environment.get("sandbox") == "host":
        return None
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise SetupError(f"{folder} needs several containers (docker-compose.yaml), and sandboxes are one each")
    named = environment.get("docker_image")
    if named:
        try:
            return image_name(named)
        except SetupError as error:
            raise SetupError(f"{folder}/task.toml: environment.docker_image: {error}") from None
    if (folder / "environment" / "Dockerfile").exists():
        raise SetupError(
            f"{folder} needs an image that is not built here (Dockerfile): build it and name it by `docker_image` under"
            ' [environment] in task.toml; or, if a shell and Python are enough, set `sandbox = "host"` there'
        )
    return None


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


def _table(config: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise SetupError(f"{folder}/task.toml: `{name}` must be a table")
    return table


def _seconds(config: Mapping[str, Any], name: str, folder: Path, default: float) -> float:
    value = _table(config, name, folder).get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_SECONDS:
        raise SetupError(
            f"{folder}/task.toml: {name}.timeout_sec must be a number of seconds up to {LONGEST_SECONDS:g}"
        )
    return float(value)


def _files(folder: Path) -> dict[str, bytes]:
    """The regular files below a folder by their path in it; links are left out."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            if path.stat().st_size > _FILE_BYTES:
                raise SetupError(f"{path} has more than {_FILE_BYTES} bytes")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _executable(folder: Path, part: str) -> list[str]:
    """Files below a part of the folder that their owner may run, by their path in the folder."""
    return [
        path.relative_to(folder).as_posix()
        for path in (folder / part).rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & stat.S_IXUSR
    ]
