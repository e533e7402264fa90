"""`POST /admin/v1/import` over HTTP: a log is read line by line as it arrives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.conftest import Gateway

TURN = {
    "session_id": "s",
    "turn": 1,
    "timestamp": "2026-01-02T03:04:05Z",
    "messages": [{"role": "user", "content": "Hello"}],
    "response_text": "Hi.",
    "next_state": None,
}
JUDGEMENT = {"session_id": "s", "turn": 1, "score": 1.0, "votes": [1, 1]}


async def send(gateway: Gateway, body: Any, query: str = "", key: str | None = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(key or gateway.admin_key) as client:
        answer = await client.post(f"/admin/v1/import{query}", content=body)
    return answer.status_code, answer.json()


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


async def test_a_log_is_imported_once_however_it_arrives(fresh_gateway: Gateway) -> None:
    log = lines(TURN, JUDGEMENT)

    async def trickling() -> AsyncIterator[bytes]:
        for at in range(0, len(log), 7):
            yield log[at : at + 7]

    status, done = await send(fresh_gateway, trickling())
    assert (status, done) == (200, {"turns": 1, "judgements": 1, "known": 0, "unusable": 0, "problems": []})
    status, done = await send(fresh_gateway, log)
    assert (done["turns"], done["judgements"], done["known"]) == (0, 0, 2)


async def test_what_cannot_be_used_is_named_by_its_line(fresh_gateway: Gateway) -> None:
    log = b"no JSON\n\n" + lines(TURN, {"nothing": 1}) + b"{}\n" * 200
    status, done = await send(fresh_gateway, log)
    assert (status, done["turns"], done["unusable"], len(done["problems"])) == (200, 1, 202, 100)
    assert [problem["line"] for problem in done["problems"][:3]] == [1, 4, 5]
    assert done["problems"][0]["reason"].startswith("not JSON")


async def test_who_may_not_and_what_does_not_exist(fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await send(fresh_gateway, lines(TURN), key=fresh_gateway.key))[0] == 403
    status, problem = await send(fresh_gateway, lines(TURN), "?policy=nobody")
    assert (status, problem["code"]) == (404, "policy_not_found")
    monkeypatch.setattr("api.admin.imports._MOST_BYTES", 1000)
    status, problem = await send(fresh_gateway, lines(TURN, *[JUDGEMENT] * 100))
    assert (status, problem["code"]) == (413, "body_too_large")
