"""Keys of episodes: genuine, forged, malformed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from clawloop.core.episodes.keys import EpisodeKey, is_episode_key, sign, verify
from clawloop.core.ids import new_episode_id

SECRET = b"s" * 32
KEY = EpisodeKey(new_episode_id(), "agent-7.ü", datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC))


def test_a_key_says_what_was_signed() -> None:
    token = sign(KEY, SECRET)
    assert is_episode_key(token)
    assert verify(token, SECRET) == KEY


def test_a_key_of_another_secret_is_refused() -> None:
    assert verify(sign(KEY, b"t" * 32), SECRET) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, policy="other"),
        replace(KEY, expires_at=KEY.expires_at + timedelta(days=1)),
        replace(KEY, episode=new_episode_id()),
    ],
)
def test_no_part_of_a_key_can_be_replaced(other: EpisodeKey) -> None:
    said, _, _ = sign(other, SECRET).partition(".")
    _, _, mac = sign(KEY, SECRET).partition(".")
    assert verify(f"{said}.{mac}", SECRET) is None


@pytest.mark.parametrize(
    "token",
    ["", "ce_", "cl-01234567-x", sign(KEY, SECRET)[:-1], sign(KEY, SECRET) + "x"],
    ids=["nothing", "prefix", "another kind", "cut", "longer"],
)
def test_what_is_no_key_is_none(token: str) -> None:
    assert not is_episode_key(token)
    assert verify(token, SECRET) is None
