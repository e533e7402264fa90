"""Chat requests to a gateway, and what the fake engine answers."""

from __future__ import annotations

from typing import Any

import orjson

from tests.api.conftest import Gateway
from tests.fakes.engine import WORDS

PATH = "/v1/chat/completions"
TEXT = "".join(WORDS)
IDS = [10, 11, 12, 13, 14, 2]


def chat_body(word: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": word}], **fields}


def events(text: str) -> list[Any]:
    """The data of each event of a stream, parsed; `[DONE]` as it is."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else orjson.loads(line) for line in lines]


async def chat(gateway: Gateway, **fields: Any) -> str:
    """Send one chat request; returns the response's id."""
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(**fields))
    assert answer.status_code == 200
    response: str = answer.json()["id"]
    return response
