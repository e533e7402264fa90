"""Episodes by verifiers alone, as its own `vf-eval` runs them: many in one process, a client of the engine itself.

Run in a Python environment that has verifiers: `python verifiers_alone.py URL EPISODES AT_A_TIME`. Prints when each
episode ended, its reward and the CPU time that passed meanwhile, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

import verifiers.v1 as vf


async def run(url: str, episodes: int, at_a_time: int) -> dict[str, object]:
    env = vf.load_environment(
        vf.resolve_env_config(
            {"taskset": {"id": "vf_sums"}, "agent": {"runtime": {"type": "subprocess"}, "timeout": {"rollout": 900.0}}}
        )
    )
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    tasks, limit = list(env.taskset), asyncio.Semaphore(at_a_time)
    ended: list[float] = []
    cpu: list[float] = []
    rewards: list[float] = []

    async def one(number: int) -> None:
        [slot] = env.slots(tasks[number % len(tasks)])
        episode = await env.run_slot(slot, context, limit)
        ended.append(time.monotonic())
        cpu.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        rewards.append(episode.traces[0].reward if episode.ok else float("nan"))

    async with env.serving():
        await asyncio.gather(*map(one, range(episodes)))
    return {"ended": ended, "cpu": cpu, "rewards": rewards}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
