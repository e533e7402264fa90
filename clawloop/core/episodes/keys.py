"""Keys of episodes: what a sandbox shows the gateway, checked without PostgreSQL.

A key reads `ce_EPISODE.MAC`. EPISODE is the episode's id, when the key expires and its policy; MAC is an HMAC-SHA256 of
that under a secret that gateways and workers share. So a gateway that cannot reach PostgreSQL still knows whose key it
is and when it ends; only that the episode ended early it learns from PostgreSQL.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from clawloop.core.episodes.kinds import CALL_LIMIT
from clawloop.core.ids import EpisodeId

SECRET_BYTES = 32
KEY_LIFETIME = CALL_LIMIT
"""An episode's key ends by itself after this, if nothing ends it before: longer than any agent takes."""
_FORM = re.compile(r"(ce_([0-9a-f]{32})([0-9a-f]{8})([A-Za-z0-9_-]+))\.([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The content of an episode's key.

    Args:
        expires_at: in whole seconds.
    """

    episode: EpisodeId
    policy: str
    expires_at: datetime


def is_episode_key(token: str) -> bool:
    """True if the token has the form of an episode's key, genuine or not."""
    return _FORM.fullmatch(token) is not None


def sign(key: EpisodeKey, secret: bytes) -> str:
    """The key's token."""
    policy = base64.urlsafe_b64encode(key.policy.encode()).decode().rstrip("=")
    signed = f"ce_{key.episode.hex}{int(key.expires_at.timestamp()):08x}{policy}"
    return f"{signed}.{_mac(signed, secret)}"


def verify(token: str, secret: bytes) -> EpisodeKey | None:
    """The content of the token; None if it was not made with this secret. An expired key is returned as well."""
    parts = _FORM.fullmatch(token)
    if parts is None or not hmac.compare_digest(_mac(parts[1], secret), parts[5]):
        return None
    try:
        policy = base64.urlsafe_b64decode(parts[4] + "=" * (-len(parts[4]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return EpisodeKey(EpisodeId(UUID(hex=parts[2])), policy, datetime.fromtimestamp(int(parts[3], 16), UTC))


def _mac(signed: str, secret: bytes) -> str:
    digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
