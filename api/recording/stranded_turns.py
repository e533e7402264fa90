"""Turns on this machine's disk that no running gateway is about to store, as recovery sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

from api.recording.spool import put_back, read_turn, rejected_turns, waiting_turns
from clawloop.encryption.sealer import Sealer
from clawloop.errors import EncryptionKeyMissing, RecordUnusable, SetupError
from clawloop.ids import ApiKeyId
from clawloop.operations.recovery import KeyOfTurns

Result = TypeVar("Result")


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
        return await asyncio.to_thread(self._in_spool, self._keys)

    async def put_back_rejected(self, keys: Collection[ApiKeyId]) -> int:
        return await asyncio.to_thread(self._in_spool, lambda: self._put_back(keys))

    def _in_spool(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except OSError as error:
            raise SetupError(f"{error}: run this as the user of the gateways, whose spool it reads") from error

    def _keys(self) -> dict[KeyOfTurns, int]:
        paths = chain(rejected_turns(self._folder), waiting_turns(self._folder))
        return dict(Counter(key for _, key in self._read(paths)))

    def _put_back(self, keys: Collection[ApiKeyId]) -> int:
        paths = [path for path, key in self._read(rejected_turns(self._folder)) if key.key in keys]
        return put_back(self._folder, paths) if paths else 0

    def _read(self, paths: Iterable[Path]) -> Iterator[tuple[Path, KeyOfTurns]]:
        for path in paths:
            try:
                record = read_turn(path, self._sealer)
            except (RecordUnusable, EncryptionKeyMissing, FileNotFoundError, ValueError):
                continue  # its gateway says so; or it was taken over meanwhile, or is no turn's file
            if record.episode_id is None:  # an episode's key ends with it
                yield path, KeyOfTurns(record.api_key_id, record.policy)
