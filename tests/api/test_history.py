"""`POST /admin/v1/judge/history` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.ids import new_turn_id
from clawloop.operations.history import HistoryTurn
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    turns = [HistoryTurn(new_turn_id(), version, verdict) for version, verdict in ((0, 1), (0, -1), (2, 1))]
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], history=turns) as running:
        yield running


async def compare(gateway: Gateway, body: Any, policy: str = "default", key: str | None = None) -> tuple[int, Any]:
    async with gateway.client(key or gateway.admin_key) as client:
        answer = await client.post("/admin/v1/judge/history", params={"policy": policy}, json=body)
    return answer.status_code, answer.json()


async def test_a_few_turns_a_call_until_none_is_left(gateway: Gateway) -> None:
    status, body = await compare(gateway, {"turns": 2})
    assert (status, body["judged"], body["left"], body["judge"]) == (200, 2, 1, "another")
    status, body = await compare(gateway, {})
    assert (body["judged"], body["left"], body["all"]["agreed"], body["applied"]) == (1, 0, 2, [])
    assert body["all"]["cells"] == [{"before": 1, "after": 1, "turns": 2}, {"before": -1, "after": 1, "turns": 1}]
    assert {version: one["turns"] for version, one in body["versions"].items()} == {"0": 2, "2": 1}


@pytest.mark.parametrize(
    ("body", "policy", "status", "code", "field"),
    [
        ({"turns": 101}, "default", 400, "invalid_value", "turns"),
        ({"nonsense": 1}, "default", 400, "invalid_value", "nonsense"),
        ({"recipe": {"name": "x", "signal": {"m": 0}}}, "default", 400, "invalid_recipe", "signal.m"),
        ({}, "nobody", 404, "policy_not_found", "policy"),
        ({"recipe": {"name": "x", "signal": {"m": 5}}, "apply": True}, "default", 409, "recipe_conflict", "recipe"),
    ],
)
async def test_bad_input(gateway: Gateway, body: Any, policy: str, status: int, code: str, field: str) -> None:
    answered, problem = await compare(gateway, body, policy)
    assert (answered, problem["code"], problem["field"]) == (status, code, field)
