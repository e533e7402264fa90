"""Runs where reasoning-gym is installed: writes tasks of each generator, and scores replies to some in sandboxes."""

from __future__ import annotations

import asyncio
import json
import sys

from clawloop.core.episodes.kinds import KINDS
from clawloop.environments.playing import packed, reward_of
from clawloop.environments.reasoning_gym.environment import GENERATORS, ReasoningGymEnvironment
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

REPLIES = (
    "<answer>{}</answer>",
    "So it is <answer> {} </answer>.",
    "{}",
    "<answer>no, {}</answer>",
    "<answer></answer>",
)


async def scored(environment: ReasoningGymEnvironment, task_id: str) -> list[float | None]:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    await environment.probe(sandboxes)
    task = environment.task(task_id)
    right = json.loads(task.tests["right.json"])["entry"]["answer"]
    rewards = []
    for reply in REPLIES:
        left = packed({"answer.txt": reply.format(right).encode()})
        box = BoxTask(
            "score",
            task.verifier,
            task.verifier_seconds,
            task.tests,
            task.verifier_folders,
            left,
            task.artifact_at,
        )
        rewards.append(reward_of(await sandboxes.run(box), task)[0])
    return rewards


def main() -> None:
    environment = ReasoningGymEnvironment.find()
    if sys.argv[1] == "score":
        sys.stdout.write(json.dumps(asyncio.run(scored(environment, sys.argv[2]))))
        return
    drawn = {}
    for split in ("train", "test"):
        for number in range(300):
            task = environment.task(f"{split}-{number}")
            drawn[task.id] = (task.files["prompt.txt"].decode(), json.loads(task.tests["right.json"]))
    missing = set(GENERATORS) - {right["generator"] for _, right in drawn.values()}
    for kind, levels in KINDS["reasoning-gym"].items():
        for level in range(1, levels.hardest + 1):
            for number in range(3):
                task = environment.task(f"train-{number}-{kind}-{level}")
                drawn[task.id] = (task.files["prompt.txt"].decode(), json.loads(task.tests["right.json"]))
    sys.stdout.write(json.dumps({"tasks": drawn, "missing": sorted(missing)}))


main()
