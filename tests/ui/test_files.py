"""A session with pictures on the page."""

from __future__ import annotations

from hashlib import sha256

import httpx

from clawloop.core.contracts.turns import Message
from tests.pictures import asks_about, image_part, png
from tests.records import turn_record
from tests.ui.conftest import Page

SCRIPT = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"


async def test_a_picture_is_shown_and_what_is_none_is_a_download(page: Page) -> None:
    asked: Message = asks_about(png())
    asked["content"].append(image_part(SCRIPT, "image/svg+xml"))  # type: ignore[union-attr]
    record = turn_record(messages=[asked], api_key_id=page.learning.key)
    session = (await page.learning.turns.insert(record)).session_id
    picture, script = (f"/ui/files/{sha256(content).hexdigest()}" for content in (png(), SCRIPT))
    async with page.visitor(page.read_key) as visitor:
        shown = await visitor.get(f"/ui/sessions/{session}")
        assert f'<img src="{picture}" alt="image/png, 30 bytes, 640x480, sha256 ' in shown
        assert f'<a href="{script}" hx-boost="false" download>' in shown
        assert f'<img src="{script}"' not in shown
        assert "base64" not in shown
        answer = await visitor.client.get(picture)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, png(), "image/png")
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
        answer = await visitor.client.get(script)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await visitor.client.get("/ui/files/abc")).status_code == 400
    async with httpx.AsyncClient(base_url=page.url) as stranger:
        assert (await stranger.get(picture)).status_code != 200
