"""Turns on this machine's disk that no running gateway is about to store, as recovery sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain
from pathlib import Path

from api.recording.spool import put_back_rejected, read_turn, rejected_turns, waiting_turns
from clawloop.encryption.sealer import Sealer
from clawloop.errors import EncryptionKeyMissing, RecordUnusable
from clawloop.operations.recovery import KeyOfTurns


class StrandedTurns:
    """Satisfies `clawloop.operations.recovery.SpooledTurns`.

    Args:
        folder: the spool of all gateways of a data folder.
        sealer: None: nothing is encrypted.
    """

    def __init__(self, folder: Path, sealer: Sealer | None) -> None:
        self._folder = folder
        self._sealer = sealer

    async def keys(self) -> dict[KeyOfTurns, int]:
        return await asyncio.to_thread(self._keys)

    def _keys(self) -> dict[KeyOfTurns, int]:
        found: Counter[KeyOfTurns] = Counter()
        for path in chain(rejected_turns(self._folder), waiting_turns(self._folder)):
            try:
                record = read_turn(path, self._sealer)
            except (RecordUnusable, EncryptionKeyMissing, FileNotFoundError, ValueError):
                continue  # its gateway says so; or it was taken over meanwhile, or is no turn's file
            if record.episode_id is None:  # an episode's key ends with it
                found[KeyOfTurns(record.api_key_id, record.policy)] += 1
        return dict(found)

    async def put_back_rejected(self) -> int:
        return await asyncio.to_thread(put_back_rejected, self._folder)
