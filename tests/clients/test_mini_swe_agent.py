"""mini-swe-agent, unchanged, plays an episode: in a real sandbox, with an episode's key, against a real gateway."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.swe.environment import SweEnvironment, generated_repository
from clawloop.environments.task import CommandHarness, Split
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import python_client
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

# As in the play.sh of docs/environments.md.
COMMAND = """
export HOME=/tmp PYTHONPATH=/agent MSWEA_CONFIGURED=true MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini
export MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
python3 -m minisweagent.run.mini --model openai/policy --task "$(cat /task/prompt.txt)" --yolo --exit-immediately
"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


async def test_it_repairs_a_repository_and_all_its_turns_are_the_episodes(gateway: Gateway) -> None:
    solution = generated_repository(Split.TRAIN, 0).solution["solve.sh"].decode()
    commands = ["ls", solution, SUBMIT]

    def answer(body: dict[str, Any]) -> Reply:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return Reply(text="I go on.", calls=[("bash", {"command": commands[said]})])

    gateway.engine.script = answer
    folder = await asyncio.to_thread(python_client, "mini_swe_agent")
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    url = urlsplit(gateway.url)
    assert url.hostname is not None
    assert url.port is not None
    environments = {"swe": SweEnvironment(CommandHarness(COMMAND, folder))}
    runner = SandboxRunner(sandboxes, environments, (url.hostname, url.port))
    key, secret = gateway.keys.add_episode("default", datetime.now(UTC) + timedelta(hours=1))
    assert key.episode is not None
    run = await runner.run_agent("swe", "train-0", key.episode, secret)
    assert (run.ending, run.reason) == (Ending.COMPLETED, "")
    assert await runner.verify("swe", "train-0", key.episode, run.artifact) == (1.0, "")
    turns = await gateway.recorded(3)
    assert {turn.episode_id for turn in turns} == {key.episode}
    assert len(turns) == 3
