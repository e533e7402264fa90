"""Plays a task in sandboxes: the agent in one, the verifier in another, whose reward is read from what it left."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawloop.core.contracts.episodes import RewardRange
from clawloop.core.errors import SandboxFailed
from clawloop.environments.task import EnvironmentTask
from clawloop.sandboxes.boxes import BoxResult, BoxTask, Sandboxes

# Rewards --------------------------------------------------------------------------------------------------------------
# The reward that a verifier wrote, in the archive of what it left.
#
# The files are Harbor's (0.26): `reward.txt` holds one number, `reward.json` an object of named numbers. Where there
# are both, Harbor reads `reward.json` alone; here they must agree.

REWARD_FILE = "reward.txt"
NAMED_REWARDS_FILE = "reward.json"
_REWARD_BYTES = 100
_NAMED_REWARDS_BYTES = 64 * 1024
_NAME = "reward"
DECLARE = "declare the range under [metadata] of task.toml, e.g. `reward_range = [0, 10]`"
# A reward in both files may be rounded in one.
_ROUNDED = 1e-3


def read_reward(archive: bytes, reward_range: RewardRange, declare: str) -> tuple[float | None, str]:
    """The reward, 0 to 1, or why there is none.

    Args:
        reward_range: of the verifier.
        declare: the remedy where it writes others: where its range is declared.

    Raises:
        KeyError, tarfile.TarError: the archive has neither file, or is none.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        named = _content(files, NAMED_REWARDS_FILE, _NAMED_REWARDS_BYTES)
        written = _content(files, REWARD_FILE, _REWARD_BYTES)
    if named is None and written is None:
        raise KeyError(REWARD_FILE)
    try:
        found = [] if named is None else _named_rewards(named)
        if written is not None:
            found.append(_single_reward(written))
    except ValueError as error:
        return None, f"the verifier's {error}"
    if not all(math.isfinite(reward) for reward in found):
        return None, "the verifier's reward is not finite"
    for other in found[1:]:
        if not math.isclose(found[0], other, rel_tol=_ROUNDED, abs_tol=_ROUNDED):
            return None, f"the verifier wrote two rewards: {found[0]:g} and {other:g}"
    try:
        return reward_range.share(found[0]), ""
    except ValueError as error:
        return None, f"the verifier's {error}: {declare}"


def _content(files: tarfile.TarFile, name: str, limit: int) -> bytes | None:
    """A file's content, or a byte more than the limit; None if there is no such file."""
    try:
        file = files.extractfile(name)
    except KeyError:
        return None
    return None if file is None else file.read(limit + 1)


def _single_reward(written: bytes) -> float:
    try:
        return float(written.decode("ascii") if len(written) <= _REWARD_BYTES else "")
    except ValueError:
        raise ValueError("reward.txt does not hold one number") from None


def _named_rewards(written: bytes) -> list[float]:
    """The numbers of the name `reward`, or the only number.

    Raises:
        ValueError: it is no object of numbers, or names several and none `reward`.
    """
    if len(written) > _NAMED_REWARDS_BYTES:
        raise ValueError(f"reward.json has more than {_NAMED_REWARDS_BYTES} bytes")
    try:
        members = json.loads(written, object_pairs_hook=_Members)
    except (ValueError, RecursionError):
        raise ValueError("reward.json is not JSON") from None
    if not isinstance(members, _Members) or not all(isinstance(value, int | float) for _, value in members):
        raise ValueError("reward.json does not hold an object of numbers")
    rewards = [value for name, value in members if name == _NAME]
    if not rewards and len(members) == 1:
        rewards = [value for _, value in members]
    if not rewards:
        raise ValueError(f"reward.json names {len(members)} rewards, and none `{_NAME}`")
    try:
        return [float(reward) for reward in rewards]
    except OverflowError:
        raise ValueError("reward is not finite") from None


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object in order, including members with an equal name."""


def packed(files: Mapping[str, bytes], executable: Collection[str] = ()) -> bytes:
    """A tar archive of these files; the same for the same files.

    Args:
        executable: which of them can be run by their path.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writing:
        for path in sorted(files):
            info = tarfile.TarInfo(path)
            info.size = len(files[path])
            if path in executable:
                info.mode = 0o755
            writing.addfile(info, io.BytesIO(files[path]))
    return archive.getvalue()


# Playing --------------------------------------------------------------------------------------------------------------
# Plays a task in sandboxes: whoever acts in one, and the verifier in another; of several steps, each after the other.
#
# Episodes and the check of a task go the same way, with another one who acts.

# What a step's command ends with if what it needs first failed, which the agent is not asked about.
NOT_READY = {96: "its healthcheck failed", 97: "its setup.sh failed"}


@dataclass(frozen=True, slots=True)
class Actor:
    """The program that acts in a sandbox: an agent, or its stand-in in a check.

    Args:
        files, executable, folders: as of `BoxTask`.
        gateway: host and port of the gateway; None: it reaches nothing.
    """

    command: Sequence[str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    executable: Collection[str] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gateway: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """Result of playing a task.

    Args:
        acted: of each step that was played.
        reward: None with the reason if there is none.
    """

    acted: Sequence[tuple[EnvironmentTask, BoxResult]]
    reward: float | None
    reason: str


async def play(
    sandboxes: Sandboxes, name: str, task: EnvironmentTask, actor_of: Callable[[EnvironmentTask], Actor]
) -> Played:
    """Play all steps of a task and verify each.

    Args:
        name: of the sandboxes, for people.
        actor_of: who acts in a step.

    Raises:
        SandboxFailed: a sandbox itself did not work.
        EpisodeUnusable: the task needs what no sandbox here has.
    """
    acted: list[tuple[EnvironmentTask, BoxResult]] = []
    rewards: list[float] = []
    for step in task.steps or (task,):
        actor = actor_of(step)
        result = await act(sandboxes, name, step, actor, acted[-1][1].artifact if acted else None)
        acted.append((step, result))
        if result.exit_code in NOT_READY:
            return Played(acted, None, _of(step, NOT_READY[result.exit_code]))
        if result.exit_code == os.EX_TEMPFAIL and actor.gateway is not None:
            return Played(acted, None, _of(step, "the gateway did not answer"))
        reward, reason = await verify(sandboxes, name, step, result.artifact)
        if reward is None:
            return Played(acted, None, _of(step, reason))
        rewards.append(reward)
        if step.least is not None and reward < step.least:
            break
    return Played(acted, rewards[-1] if task.final else sum(rewards) / len(rewards), "")


async def act(
    sandboxes: Sandboxes, name: str, step: EnvironmentTask, actor: Actor, before: bytes | None = None
) -> BoxResult:
    """
    Args:
        before: what the step before left; None: this is the first.
    """
    return await sandboxes.run(
        BoxTask(
            name=name,
            command=_after(step.before, actor.command),
            seconds=step.seconds,
            files=actor.files,
            executable=actor.executable,
            folders=actor.folders,
            archive=step.start if before is None else before or None,
            over=None if before is None else step.start,
            environment={**step.environment, **actor.environment},
            gateway=actor.gateway,
            limits=step.limits,
            image=step.image,
            fresh=before is not None,
            folder=step.folder,
        )
    )


async def verify(sandboxes: Sandboxes, name: str, step: EnvironmentTask, artifact: bytes) -> tuple[float | None, str]:
    """The reward for what was left, or None and why there is none."""
    separate = step.artifacts is not None
    result = await sandboxes.run(
        BoxTask(
            name=f"verify-{name}",
            command=step.verifier,
            seconds=step.verifier_seconds,
            files=step.tests,
            executable=step.executable_tests,
            folders=step.verifier_folders,
            archive=step.verifier_start if separate else artifact or None,
            over=artifact or None if separate else None,
            over_only=step.artifacts,
            unpack_to=step.artifact_at,
            environment={**step.environment, **step.verifier_environment},
            limits=step.limits,
            image=step.image,
            fresh=not separate,
            folder=step.folder,
        )
    )
    return reward_of(result, step)


def _after(first: str, command: Sequence[str]) -> Sequence[str]:
    return ("bash", "-c", f'{first}exec "$@"', "before", *command) if first else command


def _of(step: EnvironmentTask, reason: str) -> str:
    return f"step {step.name}: {reason}" if step.name else reason


def reward_of(result: BoxResult, task: EnvironmentTask) -> tuple[float | None, str]:
    """The reward in the verifier's files, 0 to 1, or why there is none.

    Raises:
        SandboxFailed: what the verifier left cannot be read.
    """
    if result.exit_code is None:
        return None, f"the verifier did not end in {task.verifier_seconds:g} s"
    if result.exit_code != 0:
        return None, f"the verifier failed with exit code {result.exit_code}"
    try:
        return read_reward(result.artifact, task.reward_range, DECLARE)
    except (KeyError, tarfile.TarError) as error:
        if result.problem is not None:
            raise SandboxFailed(result.problem) from error
        return None, f"the verifier wrote neither {REWARD_FILE} nor {NAMED_REWARDS_FILE}"
