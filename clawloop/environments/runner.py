"""Runs an episode's agent in a sandbox, and its verifier in another one."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping

from clawloop.contracts.episodes import AgentRun, Ending
from clawloop.environments.reward import NAMED_REWARDS_FILE, REWARD_FILE, read_reward
from clawloop.environments.task import Environment, EnvironmentTask
from clawloop.errors import EpisodeUnusable, SandboxFailed
from clawloop.ids import EpisodeId
from clawloop.sandboxes.boxes import GATEWAY_PORT, BoxResult, BoxTask, Sandboxes

# What a harness says by its exit code; any other is an error of the agent.
ENDINGS = {
    0: Ending.COMPLETED,
    3: Ending.TRUNCATED_TURNS,
    4: Ending.TRUNCATED_TOKENS,
    os.EX_TEMPFAIL: Ending.INFRASTRUCTURE,
}


class SandboxRunner:
    """Satisfies `clawloop.episodes.ports.EpisodeRunner`.

    Args:
        gateway: host and port of the gateway.
    """

    def __init__(self, sandboxes: Sandboxes, environments: Mapping[str, Environment], gateway: tuple[str, int]) -> None:
        self._sandboxes = sandboxes
        self._environments = environments
        self._gateway = gateway

    async def run_agent(
        self, environment: str, task_id: str, episode: EpisodeId, key: str, more: Mapping[str, str] | None = None
    ) -> AgentRun:
        """
        Args:
            more: further variables of the harness.
        """
        task = self._task(environment, task_id)
        url = f"http://127.0.0.1:{GATEWAY_PORT}/v1"
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **(more or {})}
        result = await self._sandboxes.run(
            BoxTask(
                name=str(episode),
                command=task.harness,
                seconds=task.seconds,
                files=task.files,
                folders=task.folders,
                archive=task.start,
                environment={**task.environment, **variables},
                gateway=self._gateway,
                limits=task.limits,
                image=task.image,
            )
        )
        return AgentRun(*_ending(result), result.artifact)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        task = self._task(environment, task_id)
        result = await self._sandboxes.run(
            BoxTask(
                name=f"verify-{episode}",
                command=task.verifier,
                seconds=task.verifier_seconds,
                files=task.tests,
                folders=task.verifier_folders,
                archive=artifact or None,
                unpack_to=task.artifact_at,
                environment={**task.environment, **task.verifier_environment},
                image=task.image,
                fresh=True,
                executable=task.executable_tests,
            )
        )
        return reward_of(result, task)

    def _task(self, environment: str, task_id: str) -> EnvironmentTask:
        if environment not in self._environments:
            raise EpisodeUnusable(f"this worker has no environment {environment!r}")
        return self._environments[environment].task(task_id)


def _ending(result: BoxResult) -> tuple[Ending, str]:
    """How the agent ended and why; the reason has nothing of its output, which may quote the conversation."""
    problem = "" if result.problem is None else f"; {result.problem}"
    if result.exit_code is None:
        return Ending.TRUNCATED_TIME, f"stopped at its time limit{problem}"
    ending = ENDINGS.get(result.exit_code, Ending.AGENT_ERROR)
    return ending, f"exit code {result.exit_code}{problem}" if result.exit_code else problem.removeprefix("; ")


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
