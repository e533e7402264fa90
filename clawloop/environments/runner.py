"""Runs an episode's agent in a sandbox, and its verifier in another one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from clawloop.core.contracts.episodes import AgentRun, Ending
from clawloop.core.errors import EpisodeUnusable
from clawloop.core.ids import EpisodeId
from clawloop.environments.check import CheckedTasks
from clawloop.environments.playing import NOT_READY, Actor, act, play, verify
from clawloop.environments.task import Environment, EnvironmentTask
from clawloop.sandboxes.boxes import GATEWAY_PORT, BoxResult, Sandboxes

# What a harness says by its exit code; any other is an error of the agent.
ENDINGS = {
    0: Ending.COMPLETED,
    3: Ending.TRUNCATED_TURNS,
    4: Ending.TRUNCATED_TOKENS,
    os.EX_TEMPFAIL: Ending.INFRASTRUCTURE,
}


class SandboxRunner:
    """Satisfies `clawloop.core.episodes.running.EpisodeRunner`.

    Args:
        gateway: host and port of the gateway.
    """

    def __init__(self, sandboxes: Sandboxes, environments: Mapping[str, Environment], gateway: tuple[str, int]) -> None:
        self._sandboxes = sandboxes
        self._environments = environments
        self._gateway = gateway
        self._checked = CheckedTasks(sandboxes)

    async def require_usable(self, environment: str, task_id: str) -> None:
        await self._checked.require_usable(self._task(environment, task_id))

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

        def agent(step: EnvironmentTask) -> Actor:
            return Actor(step.harness, step.files, (), step.folders, variables, self._gateway)

        if not task.steps:
            result = await act(self._sandboxes, str(episode), task, agent(task))
            ending, reason = _ending(result)
            # Nobody acted: what lies there says nothing of an agent.
            unscored = (None, reason) if task.before and result.exit_code in NOT_READY else None
            return AgentRun(ending, reason, result.artifact, unscored)
        # What the agent finds in a step may depend on its reward for the one before, so each is verified in its turn.
        played = await play(self._sandboxes, str(episode), task, agent)
        endings = [(step, *_ending(result)) for step, result in played.acted]
        step, ending, why = next((end for end in reversed(endings) if end[1] is not Ending.COMPLETED), endings[-1])
        reason = f"step {step.name}: {why}" if why else ""
        verdict = None if ending is Ending.INFRASTRUCTURE else (played.reward, played.reason)
        return AgentRun(ending, reason, played.acted[-1][1].artifact, verdict)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        return await verify(self._sandboxes, str(episode), self._task(environment, task_id), artifact)

    def _task(self, environment: str, task_id: str) -> EnvironmentTask:
        if environment not in self._environments:
            raise EpisodeUnusable(f"this worker has no environment {environment!r}")
        return self._environments[environment].task(task_id)


def _ending(result: BoxResult) -> tuple[Ending, str]:
    """The agent's ending and its reason; the reason has nothing of its output, which may quote the conversation."""
    problem = "" if result.problem is None else f"; {result.problem}"
    if result.exit_code is None:
        return Ending.TRUNCATED_TIME, f"stopped at its time limit{problem}"
    if result.exit_code in NOT_READY:
        return Ending.AGENT_ERROR, NOT_READY[result.exit_code]
    ending = ENDINGS.get(result.exit_code, Ending.AGENT_ERROR)
    return ending, f"exit code {result.exit_code}{problem}" if result.exit_code else problem.removeprefix("; ")
