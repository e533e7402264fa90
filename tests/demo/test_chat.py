"""`clawloop chat` against a fake gateway: what it prints for each answer, and when."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from rich.console import Console

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.chat import Chat, chat, describe_turn
from clawloop.app.demo.demo_folder import Address
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.contracts.views import TaughtHint
from clawloop.core.errors import SetupError
from tests.fakes.scripted_gateway import scripted_gateway
from tests.records import turn_view


async def test_an_answer_is_streamed_and_its_result_printed_after_the_next_message() -> None:
    output = StringIO()
    async with scripted_gateway() as gateway:
        async with (
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k") as client,
            AdminClient(gateway.url, "k") as admin,
        ):
            session = Chat(client, admin, Console(file=output, width=100))
            assert await session.send("What is rain?")
            await session.show_results()
            assert "answer 1, by tiny" in output.getvalue()
            assert "judged" not in output.getvalue()
            assert await session.send("thx\nWhat is snow?")
            for _ in range(2):  # printed once
                await session.show_results()
    printed = output.getvalue()
    assert printed.count("answer 1: judged good, trained in step 1 (by version 0)") == 1
    assert "answer 2:" not in printed
    assert list(gateway.sessions) == [session.name]
    assert len(session.messages) == 4


async def test_a_key_without_the_scope_costs_the_verdicts_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawloop.app.demo.chat._POLL_SECONDS", 0.0)
    output = StringIO()
    async with scripted_gateway(lacks_scope=True) as gateway:
        async with (
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k") as client,
            AdminClient(gateway.url, "k") as admin,
        ):
            session = Chat(client, admin, Console(file=output, width=100))
            assert await session.send("What is rain?")
            await asyncio.wait_for(session.poll_results(), 60)  # ends by itself
            assert await session.send("What is snow?")
    assert output.getvalue().count("verdicts are not shown: the key has not the scope admin\n") == 1


async def test_a_message_without_an_answer_is_discarded() -> None:
    output = StringIO()
    async with scripted_gateway(failures=["500"]) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
            session = Chat(client, None, Console(file=output, width=100))
            assert not await session.send("What is rain?")
            assert session.messages == []
            assert await session.send("What is rain?")
    assert "no answer: Error code: 500" in output.getvalue()


async def test_a_missing_gateway_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match=r"cannot chat with http://127.0.0.1:9: nothing answers there: .*--url"):
        await chat(Address("http://127.0.0.1:9", "k", None), Console(file=StringIO()))


def test_a_turn_is_described_in_words() -> None:
    turn = turn_view(version=3, why="verdict -1 by 3 of 3", verdict=-1, hints=[TaughtHint(text="Use Python.")])
    assert describe_turn(turn) == "judged bad, hint “Use Python.”, verdict -1 by 3 of 3 (by version 3)"
    hint = TaughtHint(text="No, shorter.", source="message")
    turn = turn_view(outcome=TurnOutcome.SAMPLED, why="the user's words teach it: 12 characters", hints=[hint])
    assert describe_turn(turn) == "your words “No, shorter.” teach it, waits for the next training step (by version 0)"
    assert describe_turn(turn_view(why="nothing followed")) == "nothing followed (by version 0)"


async def test_the_last_answer_is_rated_with_a_reason() -> None:
    output = StringIO()
    async with scripted_gateway() as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
            session = Chat(client, None, Console(file=output, width=100))
            assert not await session.rate("up", "")
            assert await session.send("What is rain?")
            assert await session.rate("down", "Shorter.")
            assert await session.rate("up", "")
    assert "there is no answer to rate yet" in output.getvalue()
    assert output.getvalue().count("answer 1: Saved") == 2
    reply = {"response_id": "chatcmpl-1"}
    assert gateway.feedback == [reply | {"rating": "down", "text": "Shorter."}, reply | {"rating": "up"}]


async def test_a_wait_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawloop.app.demo.chat._PATIENCE_SECONDS", 0.0)
    output = StringIO()
    async with scripted_gateway() as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k") as client:
            assert await Chat(client, None, Console(file=output, width=200)).send("What is rain?")
    assert output.getvalue().count("no answer yet: the engine is busy, or still starts") == 1


@pytest.mark.slow
async def test_an_interactive_chat_in_a_terminal(tmp_path: Path) -> None:
    async with scripted_gateway() as gateway:
        command = [sys.executable, "-m", "clawloop.app.cli.main", "chat", "--url", gateway.url, "--key", "k"]
        command += ["--admin-key", "k"]
        printed = await asyncio.to_thread(_in_a_terminal, command, tmp_path)
    assert re.search(r"answer 1, by tiny", printed)
    assert re.search(r"answer 1: judged good", printed)
    assert "Traceback" not in printed


def _in_a_terminal(command: list[str], folder: Path) -> str:
    """Type two requests, each after the previous answer, then /bye; return all output."""
    parent_fd, child_fd = pty.openpty()
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=child_fd,
        stdout=child_fd,
        stderr=child_fd,
        env=dict(os.environ) | {"PYTHONPATH": root, "PROMPT_TOOLKIT_NO_CPR": "1"},
    )
    os.close(child_fd)
    printed = ""

    def read_until(pattern: str) -> None:
        nonlocal printed
        deadline = time.monotonic() + 180
        while not re.search(pattern, printed):
            assert time.monotonic() < deadline, printed
            if select.select([parent_fd], [], [], 0.2)[0]:
                printed += os.read(parent_fd, 65536).decode(errors="replace")

    try:
        read_until("you>")
        os.write(parent_fd, b"What is rain?\r")
        read_until("answer 1, by")
        os.write(parent_fd, b"What is snow?\r")
        read_until("answer 1: judged")
        os.write(parent_fd, b"/bye\r")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent_fd)
    return printed
