"""Qwen Code, unchanged, at work against the gateway: it names no session, and changes what it sent before."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.turns import SessionSource, TurnKind
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import NODE, qwen_code
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Beyond what a message to a scripted engine takes on a busy machine.
RUN_SECONDS = 300


def script(body: dict[str, Any]) -> Reply:
    last = body["messages"][-1]
    if last["role"] == "tool":
        return Reply("Done.")
    if "greeting" in str(last["content"]):
        call = {"command": "echo good morning", "description": "Greet", "is_background": False}
        return Reply("I write it.", [("run_shell_command", call)])
    return Reply("It is ten.")


async def run(gateway: Gateway, home: Path, *arguments: str) -> None:
    program = await asyncio.to_thread(qwen_code)
    process = await asyncio.create_subprocess_exec(
        *(*program, "--yolo", *arguments),
        cwd=home / "project",
        env={
            **{"HOME": str(home), "PATH": os.pathsep.join([str(NODE.parent), "/usr/bin", "/bin"])},
            **{"OPENAI_API_KEY": gateway.key, "OPENAI_BASE_URL": f"{gateway.url}/v1", "OPENAI_MODEL": "policy"},
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RUN_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, (printed.decode()[-4000:], errors.decode()[-4000:])


async def test_resumed_conversations_are_one_session_and_chores_are_side_turns(
    gateway: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / ".qwen").mkdir()
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False},
    }
    (tmp_path / ".qwen" / "settings.json").write_text(json.dumps(settings))
    gateway.engine.script = script
    await run(gateway, tmp_path, "-p", "Write a greeting.")
    for said in ("No, that was wrong.", "Thank you."):
        await run(gateway, tmp_path, "--continue", "-p", said)
    turns = [turn for record in await gateway.recorded(4) if (turn := await gateway.turns.load(record.turn_id))]
    main = [turn for turn in turns if turn.record.kind is TurnKind.MAIN]
    assert len(main) == 4
    assert {turn.record.evidence.source for turn in main} == {SessionSource.CONVERSATION}
    assert len({turn.session_id for turn in main}) == 1
    assert [turn.parent_turn_id for turn in main] == [None, *(turn.record.turn_id for turn in main[:-1])]
    side = {turn.record.kind_reason for turn in turns if turn.record.kind is TurnKind.SIDE}
    assert side <= {"known side prompt: memory"}
