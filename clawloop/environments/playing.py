"""Plays a task in sandboxes: whoever acts in one, and the verifier in another; of several steps, each after the other.

Episodes and the check of a task go the same way, with another one who acts.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawloop.environments.reward import NAMED_REWARDS_FILE, REWARD_FILE, read_reward
from clawloop.environments.task import EnvironmentTask
from clawloop.errors import SandboxFailed
from clawloop.sandboxes.boxes import BoxResult, BoxTask, Sandboxes

# What a step's command ends with if what it needs first failed, which the agent is not asked about.
NOT_READY = {96: "its healthcheck failed", 97: "its setup.sh failed"}


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts in a sandbox: an agent, or what takes its place in a check.

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
    """What came of a task.

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
    """The reward in the verifier's files, −1e6 to 1e6, or why there is none.

    Raises:
        SandboxFailed: what the verifier left cannot be read.
    """
    if result.exit_code is None:
        return None, f"the verifier did not end in {task.verifier_seconds:g} s"
    if result.exit_code != 0:
        return None, f"the verifier failed with exit code {result.exit_code}"
    try:
        return read_reward(result.artifact)
    except (KeyError, tarfile.TarError) as error:
        if result.problem is not None:
            raise SandboxFailed(result.problem) from error
        return None, f"the verifier wrote neither {REWARD_FILE} nor {NAMED_REWARDS_FILE}"
