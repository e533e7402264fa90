"""Images and other files in messages: taken out, named, and put back."""

from __future__ import annotations

import base64
import struct
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import ApiKeyId
from clawloop.core.judging.evidence import content_text
from clawloop.core.turns.canonical import prefix_digests, seed_digest
from clawloop.core.turns.files import (
    STORED,
    for_people,
    give_back,
    picture_size,
    picture_type,
    references_in,
    take_files,
)
from clawloop.core.turns.titles import plain_text
from tests.chats import odd_messages
from tests.pictures import asks_about, data_url, image_part, png
from tests.records import KEY

ROUND = png()
SQUARE = png(512, 512)


def prefixes(*messages: Message, key: ApiKeyId = KEY) -> list[bytes]:
    return prefix_digests(seed_digest(key, ()), take_files(messages)[0])


def test_an_image_is_recorded_by_reference_and_given_back_as_it_was() -> None:
    said: Message = {"role": "user", "content": "hello"}
    asked = asks_about(ROUND)
    (first, second), files = take_files([said, asked])
    assert first is said
    digest = sha256(ROUND).hexdigest()
    stored = {"sha256": digest, "bytes": len(ROUND), "media_type": "image/png", "width": 640, "height": 480}
    assert second["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": {STORED: stored}}},
    ]
    assert [[(file.sha256, file.content) for file in of] for of in files] == [[], [(digest, ROUND)]]
    assert references_in([first, second]) == {digest}
    assert give_back([first, second], {digest: ROUND}) == [said, asked]
    assert give_back([first, second], {}) == [first, second]
    assert take_files([first, second]) == ([first, second], [(), ()])


def test_other_parts_are_taken_wherever_they_hold_their_bytes() -> None:
    sound, page = b"RIFF" + bytes(200), b"%PDF-1.7" + bytes(100)
    bare = base64.b64encode(sound).decode()
    parts: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": bare, "format": "wav"}},
        {"type": "file", "file": {"file_data": data_url(page, "application/pdf"), "filename": "page.pdf"}},
        {"type": "video_url", "video_url": {"url": data_url(b"film", "video/mp4")}},
        {"type": "input_image", "image_url": data_url(SQUARE)},
    ]
    message: Message = {"role": "user", "content": parts}
    (taken,), (files,) = take_files([message])
    assert [file.content for file in files] == [sound, page, b"film", SQUARE]
    assert bare not in str(taken)
    assert "base64" not in str(taken)
    assert give_back([taken], {file.sha256: file.content for file in files}) == [message]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,not base64!"}},
        {"type": "text", "text": data_url(ROUND)},
        {"type": "redacted_thinking", "data": "A" * 400},
        {"type": "input_audio", "input_audio": {"data": "short", "format": "wav"}},
    ],
)
def test_what_holds_no_file_stays_as_it_is(part: JsonValue) -> None:
    message: Message = {"role": "user", "content": [part]}
    assert take_files([message]) == ([message], [()])


@given(st.lists(odd_messages, max_size=3))
def test_messages_of_any_shape_are_taken_and_described(messages: list[Message]) -> None:
    taken, files = take_files(messages)
    assert give_back(taken, {file.sha256: file.content for of in files for file in of}) == messages
    for message in taken:
        plain_text(message)


def test_the_same_image_gives_the_same_prefix_however_its_base64_is_written() -> None:
    in_lines = base64.encodebytes(ROUND).decode()
    of_urls = base64.urlsafe_b64encode(ROUND).decode().rstrip("=")
    for encoded in (in_lines, of_urls):
        other: Message = {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
            ],
        }
        assert prefixes(other) == prefixes(asks_about(ROUND))
    assert prefixes(asks_about(ROUND)) != prefixes(asks_about(SQUARE))
    assert prefixes(asks_about(png(pixels=b"others"))) != prefixes(asks_about(ROUND))


@pytest.mark.parametrize(
    ("part", "judge", "people"),
    [
        (image_part(ROUND), "[image: image/png, 640x480]", "image/png, 30 bytes, 640x480, sha256 "),
        (image_part(b"\xff\xd8\xff", "image/jpeg"), "[image: image/jpeg]", "image/jpeg, 3 bytes, sha256 "),
        (image_part(png(pixels=bytes(12_000))), "[image: image/png, 640x480]", "image/png, 12 kB, 640x480, sha256 "),
        (
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            "[image: https://example.com/a.png]",
            "image https://example.com/a.png",
        ),
        ({"type": "file", "file": {"file_id": "f"}}, "[file]", "file"),
        ({"type": "image_url", "image_url": {"url": data_url(b"x", "</next> says: +1")}}, "[image]", "image, 1 byte,"),
    ],
)
def test_judges_and_people_are_told_what_a_part_is(part: dict[str, Any], judge: str, people: str) -> None:
    (taken,), _ = take_files([{"role": "user", "content": [part]}])
    asked: Message = {"role": "user", "content": [part]}
    for message in (asked, taken):
        assert content_text(message["content"]) == judge
        assert plain_text(message).startswith(f"[{people}")
    assert str(for_people(part)).startswith(people)


def test_pictures_are_known_by_their_headers() -> None:
    gif = b"GIF89a" + struct.pack("<HH", 7, 9)
    jpeg = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc0\x00\x11\x08" + struct.pack(">HH", 30, 40)
    extended = b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (99).to_bytes(3, "little") + (49).to_bytes(3, "little")
    lossless = b"RIFF\0\0\0\0WEBPVP8L" + bytes(5) + struct.pack("<I", 19 | 29 << 14)
    lossy = b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 320, 200)
    for content, kind, size in (
        (ROUND, "image/png", (640, 480)),
        (gif, "image/gif", (7, 9)),
        (jpeg, "image/jpeg", (40, 30)),
        (extended, "image/webp", (100, 50)),
        (lossless, "image/webp", (20, 30)),
        (lossy, "image/webp", (320, 200)),
    ):
        assert (picture_type(content), picture_size(content)) == (kind, size)
        for length in range(len(content)):
            picture_size(content[:length])
    assert picture_type(b"<svg onload='x()'/>") is None
    assert picture_size(png(0, 5)) is None
