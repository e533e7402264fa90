"""The real OpenClaw on a real vLLM: its words are random, its tokens are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from clawloop.local.checks import choose_port
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.conftest import running_engine
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.openclaw.configurations import configuration
from tests.e2e.openclaw.resident import running_openclaw
from tests.engine_options import engine_options

pytestmark = pytest.mark.engine

# OpenClaw's prompt alone has more than the 4,096 of other tests' engines.
CONTEXT = 32768
MESSAGES = 3


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
        # A random model may end a reply before its first word; OpenClaw takes that for a failure.
        execute(url, """UPDATE policies SET sampling = (sampling::jsonb || '{"min_tokens": 8}')::json""")
        async with running_gateway(url, keys, tmp_path / "data") as gateway:

            def configure(own: dict[str, Any]) -> dict[str, Any]:
                made = configuration("ours", own, folder, gateway.url, gateway.key)
                for model in made["models"]["providers"]["clawloop"]["models"]:
                    # Short replies; and OpenClaw believes that there is room, so that it compacts nothing.
                    model |= {"maxTokens": 24, "contextWindow": 2 * CONTEXT}
                return made

            async with running_openclaw(folder, configure) as client:
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
