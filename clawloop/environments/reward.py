"""The reward that a verifier wrote, in the archive of what it left."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Mapping

from clawloop.contracts.episodes import REWARD_LIMIT

REWARD_FILE = "reward.txt"
_REWARD_BYTES = 100


def read_reward(archive: bytes) -> tuple[float | None, str]:
    """The one number in `reward.txt`, −1e6 to 1e6, or why there is none.

    Raises:
        KeyError, tarfile.TarError: the archive has no such file, or is none.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile(REWARD_FILE)
        written = b"" if file is None else file.read(_REWARD_BYTES + 1)
    try:
        reward = float(written.decode("ascii"))
    except ValueError:
        return None, "the verifier's reward.txt does not hold one number"
    if not math.isfinite(reward):
        return None, "the verifier's reward is not finite"
    if abs(reward) > REWARD_LIMIT:
        return None, f"the verifier's reward {reward:g} is not between -{REWARD_LIMIT:g} and {REWARD_LIMIT:g}"
    return reward, ""


def packed(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of these files; the same for the same files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writing:
        for path in sorted(files):
            info = tarfile.TarInfo(path)
            info.size = len(files[path])
            writing.addfile(info, io.BytesIO(files[path]))
    return archive.getvalue()
