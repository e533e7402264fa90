"""Harbor task directories, read without Harbor: task.toml, instruction.md, environment/, tests/, solution/ and steps/.

A task runs in our own sandbox, which has the host's /usr, or the image that `docker_image` names. Files of
`environment/files` lie in /work, which is also /app, or in the image's working folder; `tests/test.sh` writes the
reward to /logs/verifier, as reward.txt or reward.json. A task whose image would have to be built is refused.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clawloop.core.contracts.episodes import UNIT_RANGE, RewardRange
from clawloop.core.episodes.kinds import LONGEST_SECONDS
from clawloop.core.errors import EpisodeUnusable, SetupError, TaskUnusable
from clawloop.environments.harbor_toml import (
    AGENT_SECONDS,
    VERIFIER_SECONDS,
    Artifact,
    Healthcheck,
    Mode,
    RewardOfSteps,
    StepTable,
    TaskTable,
    read_toml,
)
from clawloop.environments.playing import NOT_READY, packed
from clawloop.environments.task import (
    HARNESS,
    AgentLoop,
    CommandHarness,
    EnvironmentTask,
    Solution,
    Split,
    parse_task_id,
    split_of,
)
from clawloop.sandboxes.boxes import MIB, Limits
from clawloop.sandboxes.folders import WORK_VARIABLE

log = logging.getLogger(__name__)

_FILE_BYTES = 8 * 1024 * 1024
# Folders of a task directory whose files reach sandboxes.
START, TESTS, SOLUTION, STEPS, STEP_FILES = "environment/files", "tests", "solution", "steps", "workdir"
_NOT_READY_HEALTH, _NOT_READY_SETUP = NOT_READY
# Marks that data sets put before an instruction so that nobody trains on it unknowingly; Harbor leaves them out, too.
_CANARY = re.compile(r"\s*(?:(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n\s*)+", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
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
_VERIFY = f"""
work=${WORK_VARIABLE}; rm -rf "$work/reward.txt" "$work/reward.json"; mkdir -p /tmp/home
bash /tests/test.sh
cd /; find "$work" -mindepth 1 -delete
for name in reward.txt reward.json; do
    if [ -e /logs/verifier/$name ]; then cp /logs/verifier/$name "$work/$name" || exit 1; fi
done
"""
# Python of the verifier must not load what the agent left in its home.
_VERIFIER_VARIABLES = {"HOME": "/tmp/home", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
_SETUP = f'bash "${WORK_VARIABLE}/setup.sh" || exit {_NOT_READY_SETUP}\n'
_HEALTHY = f"""
began=$SECONDS; failed=0
until timeout %(timeout)s bash -c %(command)s; do
    if [ $((SECONDS - began)) -lt %(grace)s ]; then sleep %(start_interval)s; continue; fi
    failed=$((failed + 1)); [ $failed -lt %(retries)s ] || exit {_NOT_READY_HEALTH}
    sleep %(interval)s
done
"""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """
    Args:
        start: files in /work at the beginning, by path; of a later step they lie over what the one before left.
        tests, solution: files of these folders.
        image: None: the host's /usr is enough.
        executable: files of all three that can be run, by their path in the task directory.
        environment: variables of agent and verifier; verifier_environment, solution_environment: of that only. Values
            may be `${NAME}` or `${NAME:-default}`, of the worker.
        folder: see `BoxTask`.
        artifacts: see `EnvironmentTask`; paths that are not absolute are in the working folder.
        first: start of the task whose step this is, and which of its files can be run; None: this is no later step.
        healthcheck: must succeed before the agent starts.
        name, reward_range, final, steps: see `EnvironmentTask`; least: as the verifier writes it.
    """

    instruction: str
    start: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    solution: Mapping[str, bytes]
    agent_seconds: float = AGENT_SECONDS
    verifier_seconds: float = VERIFIER_SECONDS
    image: str | None = None
    executable: Collection[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    verifier_environment: Mapping[str, str] = field(default_factory=dict)
    solution_environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    limits: Limits = field(default_factory=Limits)
    artifacts: Sequence[str] | None = None
    first: tuple[Mapping[str, bytes], Collection[str]] | None = None
    healthchecks: Sequence[Healthcheck] = ()
    name: str = ""
    least: float | None = None
    reward_range: RewardRange = UNIT_RANGE
    final: bool = False
    steps: Sequence[HarborTask] = ()

    def executable_in(self, part: str) -> frozenset[str]:
        """Files of one of the folders that can be run, by their path in it."""
        return frozenset(path.removeprefix(f"{part}/") for path in self.executable if path.startswith(f"{part}/"))

    @property
    def split(self) -> Split:
        """The task's split, by a hash of its instructions and files, so that no task is ever in both."""
        asked = [self.instruction, *(step.instruction for step in self.steps[1:])]
        return split_of("\n".join([*asked, *(f"{path} {self.start[path]!r}" for path in sorted(self.start))]))

    @property
    def digest(self) -> str:
        """Digest of everything that decides the task's rewards; it never changes while this process runs."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def environment_task(
    task_id: str,
    task: HarborTask,
    harness: CommandHarness | None = None,
    variables: Mapping[str, str] | None = None,
) -> EnvironmentTask:
    """
    Args:
        harness: who plays; None: our agent loop around a shell.
        variables: of the worker, which the task may ask for.

    Raises:
        TaskUnusable: the task asks for another variable.
    """
    steps = [_played(task_id, step, harness, variables or {}) for step in task.steps or (task,)]
    return replace(steps[0], steps=tuple(steps) if task.steps else (), final=task.final)


def _played(
    task_id: str, task: HarborTask, harness: CommandHarness | None, variables: Mapping[str, str]
) -> EnvironmentTask:
    start = packed(task.start, task.executable_in(START))
    return EnvironmentTask(
        id=task_id,
        files=BASH.files(task.instruction),
        harness=HARNESS if harness is None else ("bash", "-c", harness.command),
        folders={} if harness is None else harness.folders,
        tests=task.tests,
        verifier=("bash", "-c", _VERIFY),
        seconds=task.agent_seconds,
        verifier_seconds=task.verifier_seconds,
        environment=_resolved("environment.env", task.environment, variables),
        verifier_environment=_VERIFIER_VARIABLES | _resolved("verifier.env", task.verifier_environment, variables),
        start=start,
        artifact_at="/work",
        image=task.image,
        limits=task.limits,
        folder=task.folder,
        artifacts=task.artifacts,
        verifier_start=start if task.first is None else packed(*task.first),
        executable_tests=task.executable_in(TESTS),
        before=_before(task),
        name=task.name,
        least=None if task.least is None else task.reward_range.place(task.least),
        reward_range=task.reward_range,
        solution=Solution(
            ("bash", "/solution/solve.sh"),
            task.solution,
            task.executable_in(SOLUTION),
            _resolved("solution.env", task.solution_environment, variables),
        ),
    )


def _before(task: HarborTask) -> str:
    """The step's setup.sh and healthchecks, as commands of a shell."""
    first = [_SETUP] if task.name and "setup.sh" in task.start else []
    for check in task.healthchecks:
        first.append(
            _HEALTHY
            % {
                "timeout": f"{check.timeout_sec:g}",
                "command": shlex.quote(check.command),
                "grace": f"{check.start_period_sec:.0f}",
                "start_interval": f"{check.start_interval_sec:g}",
                "retries": check.retries,
                "interval": f"{check.interval_sec:g}",
            }
        )
    return "".join(first)


def _resolved(table: str, asked: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """
    Raises:
        TaskUnusable: a variable is not there, and has no default.
    """
    found = {}
    for key, value in asked.items():
        template = _TEMPLATE.fullmatch(value)
        given = value if template is None else variables.get(template[1], template[2])
        if given is None:
            assert template is not None
            raise TaskUnusable(
                f"task.toml: {table}.{key} asks for the worker's variable {template[1]}: set it, and allow it by"
                f" --variable {template[1]}"
            )
        found[key] = given
    return found


class HarborEnvironment:
    """Satisfies `clawloop.environments.task.Environment`: the task directories of a folder.

    Task `train-N` is the N-th of the training tasks, and after the last the first again; `test-N` likewise.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[HarborTask],
        harness: CommandHarness | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._harness = harness
        self._variables = variables
        self._tasks = {split: [task for task in tasks if task.split is split] for split in Split}

    @classmethod
    def read(
        cls, folder: Path, harness: CommandHarness | None = None, variables: Mapping[str, str] | None = None
    ) -> HarborEnvironment:
        """The environment of the tasks that can be read; tasks that cannot are logged with the reason.

        Raises:
            SetupError: as `read_tasks`.
        """
        tasks, problems = read_tasks(folder)
        for problem in problems:
            log.warning("task left out", extra={"why": problem})
        log.info("tasks read", extra={"folder": str(folder), "usable": len(tasks), "left_out": len(problems)})
        return cls(environment_name(folder), tasks, harness, variables)

    @property
    def images(self) -> set[str]:
        """Images that its tasks name."""
        return {task.image for tasks in self._tasks.values() for task in tasks if task.image is not None}

    def task(self, task_id: str) -> EnvironmentTask:
        split, number = parse_task_id(task_id)
        tasks = self._tasks[split]
        if not tasks:
            raise EpisodeUnusable(f"{self.name} has no {split} task")
        task = tasks[number % len(tasks)]
        made = environment_task(task_id, task, self._harness, self._variables)
        return replace(made, digest=task.digest)


def environment_name(folder: Path) -> str:
    """The name of the environment whose tasks the folder has."""
    return folder.resolve().name


def read_tasks(folder: Path) -> tuple[list[HarborTask], list[str]]:
    """The tasks of the folder that can be read, and for each other one the reason.

    Raises:
        SetupError: the folder has no tasks, none can be read, or all of them are held out.
    """
    try:
        found = sorted(path.parent for path in folder.glob("*/task.toml"))
    except OSError as error:
        raise SetupError(f"{folder} cannot be read: {error.strerror}") from error
    if not found:
        raise SetupError(f"{folder} has no task directories: each needs a task.toml")
    tasks, problems = [], []
    for path in found:
        try:
            tasks.append(read_task(path))
        except SetupError as error:
            problems.append(str(error))
    if not tasks:
        raise SetupError(f"{folder}: none of its {len(found)} tasks can be used: {problems[0]}")
    if all(task.split is not Split.TRAIN for task in tasks):
        raise SetupError(f"{folder}: all its tasks are held out by their hash, none is left to practise on: add some")
    return tasks, problems


def read_task(folder: Path) -> HarborTask:
    """
    Raises:
        SetupError: a file is missing or wrong, a key cannot be honoured, or an image would have to be built; names the
            file, the key and the remedy.
    """
    table = read_toml(folder / "task.toml")
    environment = table.environment
    memory = environment.memory_mb or environment.memory
    storage = environment.storage_mb or environment.storage
    limits = Limits(
        memory_bytes=Limits().memory_bytes if memory is None else memory * MIB,
        disk_bytes=Limits().disk_bytes if storage is None else min(storage * MIB, Limits().disk_bytes),
        cpus=environment.cpus,
    )
    whole = HarborTask(
        instruction="",
        start=_files(folder / START),
        tests=_files(folder / TESTS),
        solution=_files(folder / SOLUTION),
        agent_seconds=table.agent.timeout_sec or AGENT_SECONDS,
        verifier_seconds=table.verifier.timeout_sec or VERIFIER_SECONDS,
        image=_image(folder, table),
        executable=_executable(folder, (START, TESTS, SOLUTION)),
        environment=environment.env,
        verifier_environment=table.verifier.env,
        solution_environment=table.solution.env,
        folder=environment.workdir,
        limits=limits,
        artifacts=_artifacts(table.artifacts, table.mode()),
        healthchecks=() if environment.healthcheck is None else (environment.healthcheck,),
        reward_range=table.reward_range,
        final=table.multi_step_reward_strategy is RewardOfSteps.FINAL,
    )
    if not table.steps:
        return _complete(folder, replace(whole, instruction=_instruction(folder)))
    steps = [_step(folder, whole, table, step, number) for number, step in enumerate(table.steps)]
    seconds = sum(step.agent_seconds + step.verifier_seconds for step in steps)
    if seconds > LONGEST_SECONDS:
        raise SetupError(
            f"{folder}/task.toml: all steps with their verifiers may take {seconds:g} s, and must not take more than"
            f" {LONGEST_SECONDS:g}: lower their timeout_sec"
        )
    return replace(steps[0], steps=tuple(steps), final=whole.final)


def _step(folder: Path, whole: HarborTask, table: TaskTable, step: StepTable, number: int) -> HarborTask:
    """A step as a task: its own settings override the task's, its tests are added over the task's tests."""
    own = folder / STEPS / step.name
    files, tests, solution = _files(own / STEP_FILES), _files(own / TESTS), _files(own / SOLUTION)
    executable = set(_executable(own, (TESTS, SOLUTION)))
    executable |= {START + path.removeprefix(STEP_FILES) for path in _executable(own, (STEP_FILES,))}
    of_task = (TESTS, *([] if solution else [SOLUTION]), *([START] if number == 0 else []))
    executable |= {path for path in whole.executable if path.startswith(tuple(f"{part}/" for part in of_task))}
    return _complete(
        folder,
        replace(
            whole,
            instruction=_instruction(own),
            start={**(whole.start if number == 0 else {}), **files},
            tests={**whole.tests, **tests},
            solution=solution or whole.solution,
            agent_seconds=step.agent.timeout_sec or whole.agent_seconds,
            verifier_seconds=step.verifier.timeout_sec or whole.verifier_seconds,
            executable=sorted(executable),
            verifier_environment={**whole.verifier_environment, **step.verifier.env},
            artifacts=_artifacts([*table.artifacts, *step.artifacts], table.mode(step)),
            first=(whole.start, whole.executable_in(START)),
            healthchecks=(
                *(whole.healthchecks if number == 0 else ()),
                *(() if step.healthcheck is None else (step.healthcheck,)),
            ),
            name=step.name,
            least=step.min_reward,
        ),
    )


def _complete(folder: Path, task: HarborTask) -> HarborTask:
    """
    Raises:
        SetupError: the task, or the step, has no test.sh or solve.sh.
    """
    where = folder / STEPS / task.name if task.name else folder
    for place, files, name in ((TESTS, task.tests, "test.sh"), (SOLUTION, task.solution, "solve.sh")):
        if name not in files:
            raise SetupError(f"{where} has no {place}/{name}")
    return task


def _instruction(folder: Path) -> str:
    path = folder / "instruction.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    if (folder / "trajectory.json").exists():
        raise SetupError(
            f"{folder}/trajectory.json: an agent here begins anew, without a conversation before: remove it"
        )
    return _CANARY.sub("", text, count=1) if _CANARY.match(text) else text


def _artifacts(artifacts: Sequence[Artifact], mode: Mode) -> Sequence[str] | None:
    if mode is Mode.SHARED:
        return None
    for artifact in artifacts:
        if artifact.exclude:
            raise SetupError(
                "artifacts.exclude is not honoured with verifier.environment_mode separate: name what is to be kept"
            )
    return [artifact.source for artifact in artifacts]


def _image(folder: Path, table: TaskTable) -> str | None:
    """`docker_image`, which Harbor uses instead of building the Dockerfile beside it."""
    for name in ("Dockerfile", "docker-compose.yaml"):
        for tests in (folder / TESTS, *(folder / STEPS / step.name / TESTS for step in table.steps)):
            if (tests / name).exists() and table.environment.sandbox is None:
                raise SetupError(f"{tests / name}: the verifier has the task's own image, and none is built here")
    if table.environment.sandbox == "host":
        return None
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise SetupError(f"{folder} needs several containers (docker-compose.yaml), and sandboxes are one each")
    if table.environment.docker_image:
        return table.environment.docker_image
    if (folder / "environment" / "Dockerfile").exists():
        raise SetupError(
            f"{folder} needs an image that is not built here (Dockerfile): build it and name it by `docker_image` under"
            ' [environment] in task.toml; or, if a shell and Python are enough, set `sandbox = "host"` there'
        )
    return None


def _files(folder: Path) -> dict[str, bytes]:
    """The regular files below a folder by their path in it; links are left out."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".harborignore":
            raise SetupError(f"{path}: which files are left out is not read: remove them, and it")
        if path.is_file() and not path.is_symlink():
            if path.stat().st_size > _FILE_BYTES:
                raise SetupError(f"{path} has more than {_FILE_BYTES} bytes")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _executable(folder: Path, parts: Sequence[str]) -> Sequence[str]:
    """Files below these parts of the folder that their owner may run, by their path in the folder."""
    return sorted(
        path.relative_to(folder).as_posix()
        for part in parts
        for path in (folder / part).rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & stat.S_IXUSR
    )
