"""Which conversations are held out of training: by a hash, so that every process and every retry chooses the same."""

from __future__ import annotations

import hashlib
from uuid import UUID

_RANGE = 2**64


def is_held_out(policy: str, unit: UUID, share: float) -> bool:
    """Whether the samples of a unit are held out.

    A higher share holds out the same units and more.

    Args:
        policy: each policy holds out other units.
        unit: the group of responses that belong together, or the session of a turn without a group: what is similar is
            held out as a whole.
        share: of all units, 0 to 1.
    """
    digest = hashlib.sha256(f"{policy}/{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * _RANGE
