"""Measures a version on held-out tasks: one attempt at each, in sandboxes as in rollouts, recorded as side turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from clawloop.core.contracts.episodes import Ending
from clawloop.core.ids import new_episode_id
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Split


@dataclass(frozen=True, slots=True)
class HeldOut:
    """
    Args:
        right: attempts with reward 1 or more.
        attempts: with a reward.
        unknown: attempts without a reward.
    """

    right: int
    attempts: int
    unknown: int


async def while_served(
    measuring: Awaitable[HeldOut], is_served: Callable[[], Awaitable[bool]], look_seconds: float
) -> HeldOut | None:
    """The measurement; None if engines unloaded the version meanwhile, because newer versions came."""
    task = asyncio.ensure_future(measuring)
    try:
        while not (await asyncio.wait({task}, timeout=look_seconds))[0]:
            if not await is_served():
                return None
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def measure_held_out(
    runner: SandboxRunner, environment: str, tasks: int, *, key: str, model: str, at_a_time: int
) -> HeldOut:
    """
    Args:
        tasks: the first so many held-out tasks.
        key: of the policy, for chats.
        model: the served name of the version.
        at_a_time: sandboxes at once.
    """
    slots = asyncio.Semaphore(at_a_time)
    # Side turns are recorded and never trained.
    fields = {"model": model, "turn_type": "side", "temperature": 1.0, "top_p": 1.0, "top_k": -1}

    async def attempt(number: int) -> float | None:
        async with slots:
            task, episode = f"{Split.TEST}-{number}", new_episode_id()
            run = await runner.run_agent(environment, task, episode, key, {"REQUEST_FIELDS": json.dumps(fields)})
            if run.ending is Ending.INFRASTRUCTURE:
                return None
            return (await runner.verify(environment, task, episode, run.artifact))[0]

    rewards = await asyncio.gather(*(attempt(number) for number in range(tasks)))
    known = [reward for reward in rewards if reward is not None]
    return HeldOut(sum(reward >= 1 for reward in known), len(known), len(rewards) - len(known))
