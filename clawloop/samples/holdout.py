"""Conversations held out of training, chosen by a hash, so that every process and every retry chooses the same."""

from __future__ import annotations

import hashlib
from uuid import UUID

_RANGE = 2**64


def is_held_out(policy: str, unit: UUID, share: float) -> bool:
    """True if the samples of a unit are held out.

    A higher share holds out the same units and more.

    Args:
        policy: each policy holds out other units.
        unit: the group of responses that belong together, or the session of a turn without a group: what is similar is
            held out as a whole.
        share: of all units, 0 to 1.
    """
    return is_in_share(f"{policy}/{unit}", share)


def is_in_share(name: str, share: float) -> bool:
    """True if a name is among this share of all names, by its hash."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * _RANGE
