"""A copy of the whole data folder goes on under another path, after the first one is gone."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.chaos.chatters import Chatters, Seen
from tests.chaos.stack import Stack, running_stack
from tests.chaos.stand_in_engine import stand_in_engine
from tests.chaos.verify import Verifier

pytestmark = [pytest.mark.slow, pytest.mark.long]

# What `docs/deploying.md` says to copy; `up` has all of it in one folder.
PARTS = ("data", "postgres", "temporal")
SESSIONS = 4


async def learn_on(stack: Stack, key: str, seen: list[Seen], seed: int) -> None:
    """Chat with this key until one more step is committed, and check that all replies so far are stored."""
    verifier = Verifier(stack)
    chatters = Chatters(stack.gateway_url, key, think_seconds=0.3)
    before = await verifier.committed_steps()
    # Users of their own: those before them have their sessions already.
    chatters.start(sessions=SESSIONS, seed=seed, first=SESSIONS * seed)
    try:
        async with asyncio.timeout(400):
            while await verifier.committed_steps() <= before:
                await asyncio.sleep(0.2)
        await chatters.end()
        assert await verifier.problems([*seen, *chatters.seen]) == []
    finally:
        chatters.stop = True
        await verifier.close()
    seen += chatters.seen


@pytest.mark.timeout(1200)
async def test_a_copied_data_folder_goes_on_where_the_first_one_stopped(tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "models")
    first, restored = tmp_path / "first", tmp_path / "elsewhere" / "restored"
    first.mkdir()
    seen: list[Seen] = []
    async with stand_in_engine(model.name, seed=1) as engine:
        async with running_stack(first, model, urlsplit(engine.url).port) as stack:
            key = stack.keys["chat"]
            await learn_on(stack, key, seen, 1)
        for part in PARTS:
            # As `cp -a` does: PostgreSQL's files belong to its own user.
            await asyncio.to_thread(_copy, first / part, restored / part)
        shutil.rmtree(first)
        engine.roots.clear()  # another machine's engine has loaded nothing
        async with running_stack(restored, model, urlsplit(engine.url).port) as stack:
            await learn_on(stack, key, seen, 2)
    assert {reply.model for reply in seen} > {model.name}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
