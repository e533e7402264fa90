"""What an environment gives: tasks, the program that plays the agent, and the verifier."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from clawloop.episodes.kinds import ChosenKind, split_task_id
from clawloop.errors import EpisodeUnusable
from clawloop.sandboxes.boxes import Limits


class Split(StrEnum):
    TRAIN = "train"  # rollouts take these
    TEST = "test"  # never trained: they show what was learned


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
        limits: of the agent's sandbox.
        image: of both sandboxes' containers, see `BoxTask`; None: they have the host's /usr.
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


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    def task(self, task_id: str) -> EnvironmentTask:
        """The task `train-N` or `test-N`, or one of a kind and level (`clawloop.episodes.kinds`); the same each time.

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
