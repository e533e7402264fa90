"""Images in all wire formats: the engine gets them, what is recorded refers to them, and people can look at them."""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from api.dependencies import Limits
from api.recording.spool import Spool
from clawloop.core.turns.files import STORED, references_in
from tests.api.conftest import Gateway, running_gateway, until
from tests.api.test_messages import VERSION
from tests.fakes.engine import FakeEngine
from tests.pictures import asks_about, data_url, image_part, png
from tests.records import turn_record

ROUND = png()
NAME = sha256(ROUND).hexdigest()
REFERENCE = {STORED: {"sha256": NAME, "bytes": len(ROUND), "media_type": "image/png", "width": 640, "height": 480}}
CHAT = "/v1/chat/completions"


def body_of(path: str) -> dict[str, Any]:
    """A request with an image, in each wire format."""
    encoded = base64.b64encode(ROUND).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [asks_about(ROUND)]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, block]}],
            "max_tokens": 8,
        },
        "/v1/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is this?"},
                        {"type": "input_image", "image_url": data_url(ROUND)},
                    ],
                }
            ]
        },
    }
    return bodies[path] | {"model": "policy"}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_gets_the_image_and_the_record_refers_to_it(gateway: Gateway, path: str, stream: bool) -> None:
    async with gateway.client() as client:
        answer = await client.post(path, json=body_of(path) | {"stream": stream}, headers=VERSION)
    assert answer.status_code == 200, answer.text
    assert gateway.engine.requests[0]["messages"][0]["content"][1] == image_part(ROUND)
    (recorded,) = await gateway.recorded()
    assert recorded.messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": REFERENCE}}  # type: ignore[index]
    assert await gateway.turns.read(NAME) == ROUND


async def test_what_goes_on_from_a_response_has_its_images(gateway: Gateway) -> None:
    async with gateway.client() as client:
        first = (await client.post("/v1/responses", json=body_of("/v1/responses"))).json()["id"]
        more = {"model": "policy", "previous_response_id": first, "input": "And its colour?"}
        second = await client.post("/v1/responses", json=more)
        counted = await client.post("/v1/responses/input_tokens", json=more)
    assert (second.status_code, counted.status_code) == (200, 200)
    assert gateway.engine.requests[1]["messages"][0] == gateway.engine.requests[0]["messages"][0]
    one, other = await gateway.recorded(2)
    assert references_in(other.messages) == references_in(one.messages) == {NAME}
    sessions = {stored.session_id for stored in await gateway.turns.all()}
    assert len(sessions) == 1


async def test_a_file_is_shown_to_admins_alone_and_as_what_it_is(gateway: Gateway) -> None:
    script = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    asked = asks_about(ROUND)
    asked["content"].append(image_part(script, "image/svg+xml"))  # type: ignore[union-attr]
    async with gateway.client() as client:
        assert (await client.post(CHAT, json={"model": "policy", "messages": [asked]})).status_code == 200
        refused = await client.get(f"/admin/v1/files/{NAME}")
        assert refused.status_code == 403
    async with gateway.client(gateway.admin_key) as client:
        shown = await client.get(f"/admin/v1/files/{NAME}")
        assert (shown.status_code, shown.content) == (200, ROUND)
        assert shown.headers["content-type"] == "image/png"
        assert shown.headers["content-disposition"] == "inline"
        other = await client.get(f"/admin/v1/files/{sha256(script).hexdigest()}")
        assert (other.content, other.headers["content-type"]) == (script, "application/octet-stream")
        assert other.headers["content-disposition"].startswith("attachment")
        for answer in (shown, other):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
            assert answer.headers["cache-control"] == "no-store"
        assert (await client.get(f"/admin/v1/files/{'0' * 64}")).status_code == 404
        assert (await client.get("/admin/v1/files/..%2Fkeys")).status_code in (400, 404)
        assert (await client.get("/admin/v1/files/abc")).status_code == 400


async def test_an_erased_file_is_gone(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(CHAT, json=body_of(CHAT))
    (turn,) = await fresh_gateway.recorded()
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        assert (await client.get(f"/admin/v1/files/{NAME}")).status_code == 200
        fresh_gateway.turns.erase([turn.turn_id])
        assert (await client.get(f"/admin/v1/files/{NAME}")).status_code == 404


async def test_an_export_has_references_or_the_images_themselves(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(CHAT, json=body_of(CHAT))
    await fresh_gateway.recorded()
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        for asked, image in (("false", {"url": REFERENCE}), ("true", {"url": data_url(ROUND)})):
            exported = (await client.get("/admin/v1/export", params={"files": asked})).json()
            assert exported["messages"][0]["content"][1] == {"type": "image_url", "image_url": image}


async def test_a_turn_with_an_image_survives_in_the_spool(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        assert (await client.post(CHAT, json=body_of(CHAT))).status_code == 200
        fresh_gateway.turns.available = False
        assert (await client.post(CHAT, json={"model": "policy", "messages": [asks_about(png(9, 9))]})).is_success
    assert fresh_gateway.spool.turns == 1
    fresh_gateway.turns.available = True
    await until(lambda: not fresh_gateway.spool.turns)
    assert await fresh_gateway.turns.read(sha256(png(9, 9)).hexdigest()) == png(9, 9)


def test_a_spooled_turn_with_an_image_reads_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    record = turn_record(messages=[asks_about(ROUND)])
    spool.write(record)
    assert spool.read(record.turn_id) == record
    spool.close()


async def test_an_image_beyond_the_bounds_is_refused(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(body_bytes=20_000)) as gateway:
        async with gateway.client() as client:
            large = {"model": "policy", "messages": [asks_about(png(pixels=bytes(20_000)))]}
            answer = await client.post(CHAT, json=large)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert engine.requests == []
