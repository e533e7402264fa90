"""`clawloop demo chat` against a stand-in gateway: what a person sees of an answer, and when."""

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

from clawloop.demo.admin_client import AdminClient, TurnSummary
from clawloop.demo.chat import Chat, chat, describe_turn
from clawloop.demo.demo_folder import Address
from clawloop.errors import SetupError
from clawloop.ids import new_turn_id
from tests.fakes.scripted_gateway import scripted_gateway


async def test_an_answer_comes_as_it_is_made_and_its_fate_once_something_follows() -> None:
    output = StringIO()
    async with scripted_gateway() as gateway:
        async with (
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k") as client,
            AdminClient(gateway.url, "k") as admin,
        ):
            talk = Chat(client, admin, Console(file=output, width=100))
            assert await talk.send("What is rain?")
            await talk.show_results()
            assert "answer 1, by pupil" in output.getvalue()
            assert "verdict" not in output.getvalue()
            assert await talk.send("thx\nWhat is snow?")
            for _ in range(2):  # printed once
                await talk.show_results()
    printed = output.getvalue()
    assert printed.count("answer 1: verdict +1, version 0, trained in step 1") == 1
    assert "answer 2:" not in printed
    assert list(gateway.sessions) == [talk.name]
    assert len(talk.messages) == 4


async def test_what_got_no_answer_was_not_said() -> None:
    output = StringIO()
    async with scripted_gateway(failures=["500"]) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
            talk = Chat(client, None, Console(file=output, width=100))
            assert not await talk.send("What is rain?")
            assert talk.messages == []
            assert await talk.send("What is rain?")
    assert "no answer: Error code: 500" in output.getvalue()


async def test_where_no_gateway_is_one_line_says_so() -> None:
    with pytest.raises(SetupError, match=r"cannot chat with http://127.0.0.1:9: .*; give --url and --key"):
        await chat(Address("http://127.0.0.1:9", "k", None), Console(file=StringIO()))


def test_a_fate_in_words_leaves_out_what_is_not_known() -> None:
    turn = TurnSummary(new_turn_id(), 3, "sampled", "verdict -1 by 3 of 3", -1, "Use Python.", None)
    assert describe_turn(turn) == "verdict -1, hint “Use Python.”, version 3, verdict -1 by 3 of 3"
    turn = TurnSummary(new_turn_id(), 0, "no_feedback", "nothing followed", None, None, None)
    assert describe_turn(turn) == "no verdict, version 0, nothing followed"


@pytest.mark.slow
async def test_in_a_terminal_one_types_reads_and_leaves(tmp_path: Path) -> None:
    async with scripted_gateway() as gateway:
        command = [sys.executable, "-m", "clawloop.cli.main", "demo", "chat", "--url", gateway.url, "--key", "k"]
        printed = await asyncio.to_thread(_in_a_terminal, command, tmp_path)
    assert re.search(r"answer 1, by pupil", printed)
    assert re.search(r"answer 1: verdict \+1", printed)
    assert "Traceback" not in printed


def _in_a_terminal(command: list[str], folder: Path) -> str:
    """Type two requests, each after the answer before, then /bye; returns all that was on the screen."""
    ours, theirs = pty.openpty()
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(os.environ) | {"PYTHONPATH": root, "PROMPT_TOOLKIT_NO_CPR": "1"},
    )
    os.close(theirs)
    printed = ""

    def read_until(pattern: str) -> None:
        nonlocal printed
        deadline = time.monotonic() + 60
        while not re.search(pattern, printed):
            assert time.monotonic() < deadline, printed
            if select.select([ours], [], [], 0.2)[0]:
                printed += os.read(ours, 65536).decode(errors="replace")

    try:
        read_until("you>")
        os.write(ours, b"What is rain?\r")
        read_until("answer 1, by")
        os.write(ours, b"What is snow?\r")
        read_until("answer 1: verdict")
        os.write(ours, b"/bye\r")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return printed
