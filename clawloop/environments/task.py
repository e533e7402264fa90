"""Environments: their tasks, the program that plays the agent, and the verifier."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from clawloop.core.contracts.episodes import UNIT_RANGE, RewardRange
from clawloop.core.episodes.kinds import ChosenKind, split_task_id
from clawloop.core.errors import EpisodeUnusable, SetupError
from clawloop.sandboxes.boxes import Limits

# Agents ---------------------------------------------------------------------------------------------------------------
# Who plays: our own loop around tools, or a command that is brought along; both in the sandbox.

AGENT_FOLDER = "/agent"
HARNESS = ("python3", "-I", "/task/harness.py")


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """
    Args:
        tool: as OpenAI's API describes tools.
        argument: of the tool; its value is the last argument of `program`.
        seconds: a call is stopped after this.
        turns: the episode is truncated after so many replies.
        max_tokens: of a reply.
        folder: in which the program runs.
        answer: file for the last reply; None: only what is left in /work counts.
    """

    tool: dict[str, Any]
    argument: str
    program: Sequence[str]
    folder: str
    turns: int
    seconds: float
    max_tokens: int
    answer: str | None

    def files(self, prompt: str) -> dict[str, bytes]:
        """Files for `HARNESS`, below /task."""
        return _files(prompt, {**asdict(self), "tools": [self.tool]})


@dataclass(frozen=True, slots=True)
class SessionLoop:
    """The loop around a program that runs during the whole episode and answers the calls of several tools.

    Args:
        tools: as OpenAI's API describes them.
        session: the program. It writes one line at its start and one for each line it reads, which is a call: JSON
            objects, with `text`, and if need be with `picture`, a PNG in base64, or `ended`.
        turns, max_tokens: as of `AgentLoop`.
    """

    tools: Sequence[dict[str, Any]]
    session: Sequence[str]
    turns: int
    max_tokens: int

    def files(self, prompt: str) -> dict[str, bytes]:
        """Files for `HARNESS`, below /task."""
        return _files(prompt, {**asdict(self), "answer": None})


@dataclass(frozen=True, slots=True)
class CommandHarness:
    """An agent that is brought along.

    Args:
        command: for bash, in /work; the task is in /task/prompt.txt.
        folder: of this machine, with what the command needs; read-only at `AGENT_FOLDER` in the sandbox.
    """

    command: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise SetupError(f"--harness-folder {self.folder} is no folder")

    @property
    def folders(self) -> dict[str, Path]:
        return {} if self.folder is None else {AGENT_FOLDER: self.folder.resolve()}


def _files(prompt: str, config: Mapping[str, Any]) -> dict[str, bytes]:
    program = importlib.resources.files("clawloop.environments") / "inside" / "harness.py"
    return {
        "prompt.txt": prompt.encode(),
        "harness.py": program.read_bytes(),
        "harness.json": json.dumps(config).encode(),
    }


# Tasks ----------------------------------------------------------------------------------------------------------------
# What an environment gives: tasks, the program that plays the agent, and the verifier.


class Split(StrEnum):
    TRAIN = "train"  # rollouts take these
    TEST = "test"  # never trained: they show what was learned


@dataclass(frozen=True, slots=True)
class Solution:
    """The program that runs in place of the agent where a task is checked.

    Args:
        files: below /solution.
        executable: which of them can be run by their path.
    """

    command: Sequence[str]
    files: Mapping[str, bytes]
    executable: Collection[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """
    Args:
        files: what the agent finds below /task, read-only.
        harness: the command that plays the agent, in the agent's sandbox.
        tests: what the verifier finds below /task; the agent never sees them.
        executable_tests: which of them can be run by their path.
        verifier: the command that writes the reward to /work/reward.txt, in a sandbox of its own; what the agent left
            is below /artifact.
        seconds, verifier_seconds: time limits.
        environment: variables of both commands; verifier_environment: of the verifier only.
        start: a tar archive of what the agent finds in /work; None: nothing.
        artifact_at: where the verifier finds what the agent left.
        folders: of this machine, read-only in the agent's sandbox, by where they are there.
        verifier_folders: likewise in the verifier's.
        limits: of both sandboxes.
        image: of both sandboxes' containers, see `BoxTask`; None: they have the host's /usr.
        folder: of both sandboxes, see `BoxTask`.
        artifacts: of what the agent left the verifier finds these files and folders alone, over `verifier_start`; None:
            all, and nothing else.
        steps: the task is these, one after the other, each in the files that the one before left; the first is this
            task itself. Empty: it is one.
        before: commands of bash that run in the agent's sandbox before the agent, and end it where they fail.
        name: of the step.
        least: no further step follows a reward below this.
        reward_range: of what the verifier writes; rewards, `least` too, are shares of it.
        final: the last step's reward is the task's, not the mean of all steps that were played.
        solution: solves the task, or the step.
        digest: of a task that must be checked before it is played; None: it need not be.
    """

    id: str
    files: Mapping[str, bytes]
    harness: Sequence[str]
    tests: Mapping[str, bytes]
    verifier: Sequence[str]
    seconds: float = 300.0
    verifier_seconds: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    verifier_environment: Mapping[str, str] = field(default_factory=dict)
    start: bytes | None = None
    artifact_at: str = "/artifact"
    folders: Mapping[str, Path] = field(default_factory=dict)
    verifier_folders: Mapping[str, Path] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    image: str | None = None
    executable_tests: Collection[str] = ()
    folder: str | None = None
    artifacts: Sequence[str] | None = None
    verifier_start: bytes | None = None
    steps: Sequence[EnvironmentTask] = ()
    before: str = ""
    name: str = ""
    least: float | None = None
    reward_range: RewardRange = UNIT_RANGE
    final: bool = False
    solution: Solution | None = None
    digest: str | None = None


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    def task(self, task_id: str) -> EnvironmentTask:
        """The task `train-N` or `test-N`, or one of a kind and level (see `core.episodes.kinds`); the same each time.

        Raises:
            EpisodeUnusable: no task has this id.
        """


# One in five: enough for a success rate within some percent where an environment has hundreds of tasks.
_TEST_SHARE = 5


def split_of(content: str) -> Split:
    """The split of a task with this content: by a hash, so that no task is ever in both."""
    return Split.TEST if hashlib.sha256(content.encode()).digest()[0] % _TEST_SHARE == 0 else Split.TRAIN


def parse_task_id(task_id: str) -> tuple[Split, int]:
    """The split and number of `train-N` or `test-N`.

    Raises:
        EpisodeUnusable
    """
    name, _, number = task_id.partition("-")
    if name not in tuple(Split) or not number.isascii() or not number.isdecimal():
        raise EpisodeUnusable(f"{task_id!r} is no task: they are called train-N and test-N")
    return Split(name), int(number)


def parse_chosen_task_id(environment: str, task_id: str) -> tuple[Split, int, ChosenKind | None]:
    """The split and number of a task, and the kind and level that its id chooses, if it chooses.

    Raises:
        EpisodeUnusable
    """
    numbered, chosen = split_task_id(environment, task_id)
    return *parse_task_id(numbered), chosen
