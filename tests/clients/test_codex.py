"""A coding agent that speaks OpenAI's Responses, unchanged, at work against the gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.turns import MatchedBy, SessionSource, TurnKind, TurnStatus
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import codex
from tests.fakes.engine import PROMPT_IDS
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ASKED = "Write a greeting into hello.txt and show it."
GREETING = "good morning"
SAID = "The file has the greeting."
# Beyond what a turn of a scripted engine takes on a busy machine.
RUN_SECONDS = 300
PROVIDER = """\
model = "policy"
model_provider = "clawloop"

[model_providers.clawloop]
name = "Clawloop"
base_url = "{url}/v1"
env_key = "CLAWLOOP_KEY"
wire_api = "responses"
"""
# Codex summarises the conversation before a request, once the one before it had this many tokens.
LIMIT = 20_000


def script(body: dict[str, Any]) -> Reply:
    """Write the file and show it, say so; then every message is answered at once."""
    if any(message["role"] == "tool" for message in body["messages"]):
        return Reply(SAID)
    return Reply("I write it.", [("exec_command", {"cmd": f"echo {GREETING} > hello.txt; cat hello.txt"})])


async def run(gateway: Gateway, home: Path, *arguments: str, provider: str = PROVIDER) -> str:
    """The last thing that Codex says."""
    program = await asyncio.to_thread(codex)
    (home / "config.toml").write_text(provider.format(url=gateway.url))
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    process = await asyncio.create_subprocess_exec(
        *(str(program), "exec", *arguments[:-1], *options, arguments[-1]),
        cwd=home / "project",
        env={"HOME": str(home), "CODEX_HOME": str(home), "CLAWLOOP_KEY": gateway.key, "PATH": "/usr/bin:/bin"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RUN_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, (printed.decode()[-4000:], errors.decode()[-4000:])
    items = [json.loads(line).get("item", {}) for line in printed.decode().splitlines()]
    return str([item["text"] for item in items if item.get("type") == "agent_message"][-1])


async def test_codex_works_in_one_session(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    gateway.engine.script = script
    assert await run(gateway, tmp_path, ASKED) == SAID
    assert await run(gateway, tmp_path, "resume", "--last", "Thank you.") == SAID
    assert (tmp_path / "project" / "hello.txt").read_text().strip() == GREETING
    turns = [await gateway.turns.load(record.turn_id) for record in gateway.turns.records]
    stored = [turn for turn in turns if turn is not None]
    assert len({turn.session_id for turn in stored}) == 1
    assert {turn.record.evidence.source for turn in stored} == {SessionSource.THREAD}
    assert [turn.record.finish_reason for turn in stored] == ["tool_calls", "stop", "stop"]
    assert [turn.parent_turn_id for turn in stored] == [None, *(turn.record.turn_id for turn in stored[:-1])]
    for turn in stored:
        record = turn.record
        assert (record.status, record.prompt_ids) == (TurnStatus.COMPLETE, PROMPT_IDS)
        assert record.logprobs == [-token / 100 for token in record.response_ids or ()]
    [result] = [message for message in stored[-1].record.messages if message["role"] == "tool"]
    assert GREETING in str(result["content"])


async def test_a_compaction_is_a_chore_of_the_same_session(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    asked = iter(
        [Reply("It is ten.", prompt_tokens=LIMIT + 1), Reply("Time was asked for."), Reply("Sorry."), Reply("Bye.")]
    )
    gateway.engine.script = lambda body: next(asked)
    small = f"model_auto_compact_token_limit = {LIMIT}\n{PROVIDER}"
    for number, said in enumerate(("What time is it?", "No, that was wrong.", "Thank you.")):
        again = ("resume", "--last") if number else ()
        await run(gateway, tmp_path, *again, said, provider=small)
    stored = [turn for record in await gateway.recorded(4) if (turn := await gateway.turns.load(record.turn_id))]
    assert len({turn.session_id for turn in stored}) == 1
    assert [turn.record.kind for turn in stored] == [TurnKind.MAIN, TurnKind.SIDE, TurnKind.MAIN, TurnKind.MAIN]
    assert stored[1].record.kind_reason == "header x-codex-turn-metadata: request_kind=compaction"
    assert [turn.matched_by for turn in stored] == [None, MatchedBy.CONTEXT, None, MatchedBy.CONTEXT]
    assert all("It is ten." not in str(turn.record.messages) for turn in stored[2:])
