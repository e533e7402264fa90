"""Bad input gets its status and a message with field and remedy; nothing is recorded, the next request is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from api.dependencies import Limits
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import FakeEngine

GOOD = chat_body()


def _without(field: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != field}


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{not json", 400, "invalid_json", "not JSON"),
        (b"", 400, "invalid_json", "not JSON"),
        (b'{"model": "policy", "messages": "\xff\xfe"}', 400, "invalid_json", "UTF-8"),
        (b'"text"', 400, "invalid_json", "JSON object"),
        (b"[" * 100_000, 400, "invalid_json", "not JSON"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "model": ' + b"[" * 300 + b"]" * 300 + b"}",
            400,
            "invalid_json",
            "nested too deeply",
        ),
        (GOOD | {"metadata": orjson.loads(b'{"a": ' * 128 + b"1" + b"}" * 128)}, 400, "invalid_json", "128 levels"),
        (GOOD | {"metadata": orjson.loads(b"[" * 127 + b"]" * 127)}, 400, "invalid_value", "`metadata`"),
        (_without("model"), 400, "missing_required_parameter", "`model`"),
        (_without("messages"), 400, "missing_required_parameter", "`messages`"),
        (_without("messages") | {"message": []}, 400, "missing_required_parameter", "`message`"),
        (GOOD | {"messages": []}, 400, "invalid_value", "`messages`"),
        (GOOD | {"messages": "hi"}, 400, "invalid_value", "`messages`"),
        (GOOD | {"messages": [{"content": "hi"}]}, 400, "missing_required_parameter", "`messages.0.role`"),
        (GOOD | {"messages": [{"role": "wizard"}]}, 400, "invalid_value", "`messages.0.role`"),
        (GOOD | {"messages": ["hi"]}, 400, "invalid_value", "`messages.0`"),
        (GOOD | {"stream": "yes"}, 400, "invalid_value", "`stream`"),
        (GOOD | {"n": 0}, 400, "invalid_value", "`n`"),
        (GOOD | {"n": 10_000}, 400, "invalid_value", "`n`"),
        (GOOD | {"temperature": "hot"}, 400, "invalid_value", "`temperature`"),
        (GOOD | {"temperature": 3}, 400, "invalid_value", "`temperature`"),
        (GOOD | {"tools": "exec"}, 400, "invalid_value", "`tools`"),
        (GOOD | {"session_id": 7}, 400, "invalid_value", "`session_id`"),
        (GOOD | {"metadata": "x"}, 400, "invalid_value", "`metadata`"),
        (GOOD | {"model": "gpt-5"}, 404, "model_not_found", "`policy`"),
        (GOOD | {"model": "default-v7"}, 404, "model_not_found", "default-v7"),
        (GOOD | {"model": 5}, 400, "invalid_value", "`model`"),
    ],
)
async def test_a_bad_body_is_refused_with_field_and_remedy(
    gateway: Gateway, body: Any, status: int, code: str, message: str
) -> None:
    async with gateway.client() as client:
        answer = await (client.post(PATH, content=body) if isinstance(body, bytes) else client.post(PATH, json=body))
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == code
        assert message in error["message"]
        assert "Traceback" not in answer.text
        assert (await client.post(PATH, json=GOOD)).status_code == 200
    assert len(await gateway.recorded()) == 1
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize(
    ("header", "message"),
    [(None, "Bearer KEY"), ("Basic abc", "Bearer KEY"), ("Bearer", "Bearer KEY"), ("Bearer cl-nope", "not known")],
)
async def test_a_missing_or_invalid_key_is_401(gateway: Gateway, header: str | None, message: str) -> None:
    async with gateway.client() as client:
        if header is None:
            del client.headers["Authorization"]
        else:
            client.headers["Authorization"] = header
        answer = await client.post(PATH, json=GOOD)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert message in answer.json()["error"]["message"]
    assert not gateway.engine.requests


async def test_a_key_without_the_scope_is_403(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        assert (await client.post(PATH, json=GOOD)).status_code == 403
        engines = await client.get("/admin/v1/engines")
        assert engines.json()["engines"][0]["id"] == "e0"
    async with gateway.client() as client:
        refused = await client.get("/admin/v1/engines")
    assert refused.status_code == 403
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["status"] == 403
    assert "admin" in refused.json()["detail"]


async def test_a_body_over_the_limit_is_413_and_the_client_gets_the_answer(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(body_bytes=1024 * 1024)) as gateway:
        big = GOOD | {"messages": [{"role": "user", "content": "x" * 50 * 1024 * 1024}]}
        async with gateway.client() as client:
            answer = await client.post(PATH, json=big)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert "1 MiB" in answer.json()["error"]["message"]
            assert (await client.post(PATH, json=GOOD)).status_code == 200


async def test_a_body_that_arrives_too_slowly_is_408(engine: FakeEngine, tmp_path: Path) -> None:
    async def slowly() -> Any:
        yield b'{"model": '
        await asyncio.sleep(1)

    async with (
        running_gateway(tmp_path, engines=[engine], limits=Limits(upload_seconds=0.2)) as gateway,
        gateway.client() as client,
    ):
        answer = await client.post(PATH, content=slowly())
    assert answer.status_code == 408


@pytest.mark.parametrize(("path", "method", "status"), [("/v1/nothing", "GET", 404), (PATH, "GET", 405)])
async def test_unknown_routes_and_methods_answer_in_openais_shape(
    gateway: Gateway, path: str, method: str, status: int
) -> None:
    async with gateway.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost:30000"}, 200),
        ({"Host": "[::1]:30000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://203.0.113.9"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:5173"}, 200),
    ],
)
async def test_foreign_hosts_and_origins_are_refused(gateway: Gateway, headers: dict[str, str], status: int) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=GOOD, headers=headers)
    assert answer.status_code == status
