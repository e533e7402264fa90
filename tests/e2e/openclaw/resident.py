"""The real OpenClaw, resident, in a home folder of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from clawloop.app.local.checks import choose_port
from tests.clients.packages import NODE, openclaw

TOKEN = "of-its-own-gateway"
# 5 s alone; other tests may have the machine.
START_SECONDS = 300
# Its runner gives up after 140 s of retries; a turn takes seconds.
TURN_SECONDS = 400


@dataclass
class OpenClaw:
    """
    Args:
        turn_seconds: how long an answer may take.
    """

    url: str
    folder: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes]
    turn_seconds: float = TURN_SECONDS

    async def say(self, text: str, conversation: str) -> str:
        """Send a person's message; returns the answer. Heartbeats are in the conversation `main`."""
        headers = {"Authorization": f"Bearer {TOKEN}", "x-openclaw-session-key": f"agent:main:{conversation}"}
        body = {"model": "openclaw", "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self.turn_seconds) as client:
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{self.log()}"
        return str(answer.json()["choices"][0]["message"]["content"])

    async def type(self, text: str, conversation: str) -> None:
        """Send what a person types in a chat window, where slash commands are taken."""
        sent = {"sessionKey": f"agent:main:{conversation}", "message": text, "idempotencyKey": str(uuid4())}
        await self.command("gateway", "call", "chat.send", "--params", json.dumps(sent))

    async def command(self, *arguments: str) -> str:
        """What `openclaw …` prints."""
        finished = await asyncio.to_thread(
            subprocess.run,
            [*openclaw(), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        assert finished.returncode == 0, f"{arguments}: {finished.stdout[-2000:]} {finished.stderr[-2000:]}"
        return finished.stdout

    def log(self) -> str:
        return (self.folder / "openclaw.log").read_text(errors="replace")[-4000:]


@asynccontextmanager
async def running_openclaw(
    folder: Path,
    configure: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    turn_seconds: float = TURN_SECONDS,
    **environment: str,
) -> AsyncIterator[OpenClaw]:
    """
    Args:
        folder: empty.
        configure: makes OpenClaw's configuration of what a person had before.
        turn_seconds: how long an answer may take.
        environment: of its process and the commands that the agent runs.
    """
    command = await asyncio.to_thread(openclaw)  # installs it
    port = choose_port("OpenClaw", "127.0.0.1", 0, "")
    for name in ("home", "state", "workspace"):
        (folder / name).mkdir(parents=True)
    own = {
        "gateway": {
            "mode": "local",
            "bind": "loopback",
            "port": port,
            "auth": {"mode": "token", "token": TOKEN},
            "http": {"endpoints": {"chatCompletions": {"enabled": True}}},
        },
        "agents": {"defaults": {"workspace": str(folder / "workspace"), "skipBootstrap": True}},
    }
    (folder / "openclaw.json").write_text(json.dumps(configure(own)))
    settings = {
        "HOME": str(folder / "home"),
        "OPENCLAW_STATE_DIR": str(folder / "state"),
        "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json"),
        "OPENCLAW_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
        "PATH": os.pathsep.join([str(NODE.parent), str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
    } | environment
    with (folder / "openclaw.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "gateway", "run"],
            cwd=folder / "workspace",
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    running = OpenClaw(f"http://127.0.0.1:{port}", folder, settings, process, turn_seconds)
    try:
        await _until_ready(running)
        yield running
    finally:
        with suppress(ProcessLookupError):  # it ended: what it said of that is raised
            os.killpg(process.pid, signal.SIGKILL)  # it starts processes of its own
        await asyncio.to_thread(process.wait, 60)


async def _until_ready(running: OpenClaw) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "[gateway] ready" not in running.log():
        assert running.process.poll() is None, f"OpenClaw ended: {running.log()}"
        assert time.monotonic() < deadline, f"OpenClaw is not ready: {running.log()}"
        await asyncio.sleep(0.1)
