"""The real OpenClaw on a real vLLM: its words are random, its tokens are not."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from clawloop.app.local import parts
from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.vllm import read_model
from clawloop.app.local.supervision.supervisor import Part
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.adapters import random_versions
from tests.e2e.conftest import running_engine
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.openclaw.configurations import configuration
from tests.e2e.openclaw.recorded import Session, by_conversation, read_back
from tests.e2e.openclaw.resident import OpenClaw, running_openclaw
from tests.e2e.openclaw.stack import ENGINE, GATEWAYS, running_stack
from tests.e2e.publishing import publish_all
from tests.engine_options import engine_options

pytestmark = pytest.mark.engine

# OpenClaw's prompt alone has more than the 4,096 of other tests' engines.
CONTEXT = 32768
MESSAGES = 3
PEOPLE = 2
# vLLM starts within a minute on two cores, within minutes where others have them.
PATIENCE_SECONDS = 900
# A random model may end a reply before its first word; OpenClaw takes that for a failure.
MIN_TOKENS = """UPDATE policies SET sampling = (sampling::jsonb || '{"min_tokens": 8}')::json"""


async def test_the_tokens_of_a_session_are_recorded(
    postgres_server: Any, tiny_model_path: Path, tmp_path: Path
) -> None:
    execute(postgres_server.url, "CREATE DATABASE openclaw_tokens")
    url = database_address(postgres_server.url, "openclaw_tokens")
    await asyncio.to_thread(migrate, url)
    port = choose_port("vLLM", "127.0.0.1", 0, "")
    options = engine_options(tiny_model_path, port, max_model_len=CONTEXT)
    folder = tmp_path / "openclaw"
    with running_engine(tiny_model_path, options, tmp_path / "vllm.log") as engine:
        keys = await prepared(url, [engine])
        execute(url, MIN_TOKENS)
        async with running_gateway(url, keys, tmp_path / "data") as gateway:
            async with running_openclaw(
                folder, lambda own: short_replies(own, folder, gateway.url, gateway.key)
            ) as client:
                for number in range(MESSAGES):
                    await client.say(f"This is ask-real-{number}.", "real")
            turns = await recorded(gateway)
    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    asked = set()
    for turn in turns:
        tokens = turn["tokens"]
        assert len(tokens["logprobs"]) == len(tokens["response_ids"])
        prompt = tokenizer.decode(tokens["prompt_ids"], skip_special_tokens=False)
        asked |= {number for number in range(MESSAGES) if f"ask-real-{number}" in prompt}
        said = tokenizer.decode(tokens["response_ids"], skip_special_tokens=False).removesuffix("<|im_end|>")
        if "<" not in said:  # else it may be taken for markup
            assert turn["response"]["content"] == said
    assert asked == set(range(MESSAGES))


async def test_no_turn_fails_while_it_restarts(
    postgres_server: Any, temporal_address: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    """A version is published, a gateway dies and then vLLM itself, while people talk."""
    execute(postgres_server.url, "CREATE DATABASE openclaw_restarts")
    url = database_address(postgres_server.url, "openclaw_restarts")
    await asyncio.to_thread(migrate, url)
    folder = tmp_path / "openclaw"

    def real_engine(port: int) -> Part:
        options = engine_options(tiny_model_path, port, max_model_len=CONTEXT)
        return parts.vllm(ENGINE, read_model(tiny_model_path), options, "the CPU", dict(os.environ))

    async with running_stack(tmp_path / "stack", url, temporal_address, real_engine) as stack:
        execute(url, MIN_TOKENS)
        [version] = random_versions(tiny_model_path, stack.data / "adapters", [1])
        async with running_openclaw(folder, lambda own: short_replies(own, folder, stack.url, stack.key)) as client:
            people = Talkers(client)
            async with asyncio.TaskGroup() as group:
                for number in range(PEOPLE):
                    group.create_task(people.talk(f"r{number}"))
                await people.more(PEOPLE)
                publishing = group.create_task(publish_all(stack.database_url, stack.temporal, [version]))
                assert stack.supervisor.kill(GATEWAYS[0])
                await publishing
                await people.more(PEOPLE)
                assert stack.supervisor.kill(ENGINE)
                await people.more(2 * PEOPLE)
                await stack.supervisor.ready_again(ENGINE)
                people.stop = True
            sessions = await read_back(stack, people.are_recorded)
    assert {turn.view["version"] for session in sessions for turn in session.main} == {0, 1}
    print(f"{sum(people.answered.values())} messages answered")  # noqa: T201


@dataclass
class Talkers:
    """People who say one thing after the other; what is answered is random.

    Attributes:
        answered: how many messages of each were answered.
    """

    client: OpenClaw
    answered: Counter[str] = field(default_factory=Counter)
    stop: bool = False

    async def talk(self, name: str) -> None:
        while not self.stop:
            await self.client.say(f"This is ask-{name}-{self.answered[name] + 1}.", name)
            self.answered[name] += 1

    async def more(self, count: int) -> None:
        """Wait until so many more messages were answered."""
        goal = self.answered.total() + count
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.answered.total() < goal:
                await asyncio.sleep(0.05)

    def are_recorded(self, sessions: Sequence[Session]) -> bool:
        """Every answered message has a complete main turn in the session of its conversation."""
        complete = {
            (turn.about.conversation, turn.about.number)
            for session in by_conversation(sessions).values()
            for turn in session.main
            if turn.view["status"] in ("complete", "length")
        }
        return complete >= {(name, n + 1) for name, count in self.answered.items() for n in range(count)}


def short_replies(own: dict[str, Any], folder: Path, url: str, key: str) -> dict[str, Any]:
    made = configuration("ours", own, folder, url, key)
    for model in made["models"]["providers"]["clawloop"]["models"]:
        # And OpenClaw believes that there is room, so that it compacts nothing.
        model |= {"maxTokens": 24, "contextWindow": 2 * CONTEXT}
    return made


async def recorded(gateway: RealGateway) -> list[dict[str, Any]]:
    """The main turns of the only session with one, with their tokens."""
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120) as client:
        async with asyncio.timeout(120):
            while True:
                sessions = (await client.get("/admin/v1/sessions")).json()["sessions"]
                mine = [session for session in sessions if session["main_turns"]]
                if sum(session["main_turns"] for session in mine) >= MESSAGES:
                    break
                await asyncio.sleep(0.5)
        [session] = mine
        turns = (await client.get(f"/admin/v1/sessions/{session['id']}")).json()["turns"]
        main = [turn["id"] for turn in turns if turn["kind"] == "main"]
        return [(await client.get(f"/admin/v1/turns/{turn}", params={"tokens": "true"})).json() for turn in main]
