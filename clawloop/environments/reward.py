"""The reward that a verifier wrote, in the archive of what it left.

The files are Harbor's (0.26): `reward.txt` holds one number, `reward.json` an object of named numbers. Where there are
both, Harbor reads `reward.json` alone; here they must agree.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Collection, Mapping
from typing import Any

from clawloop.contracts.episodes import REWARD_LIMIT

REWARD_FILE = "reward.txt"
NAMED_REWARDS_FILE = "reward.json"
_REWARD_BYTES = 100
_NAMED_REWARDS_BYTES = 64 * 1024
_NAME = "reward"
# A reward in both files may be rounded in one.
_ROUNDED = 1e-3


def read_reward(archive: bytes) -> tuple[float | None, str]:
    """The reward, −1e6 to 1e6, or why there is none.

    Raises:
        KeyError, tarfile.TarError: the archive has neither file, or is none.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        named = _content(files, NAMED_REWARDS_FILE, _NAMED_REWARDS_BYTES)
        written = _content(files, REWARD_FILE, _REWARD_BYTES)
    if named is None and written is None:
        raise KeyError(REWARD_FILE)
    try:
        found = [] if named is None else _named_rewards(named)
        if written is not None:
            found.append(_single_reward(written))
        rewards = [_within_limits(reward) for reward in found]
    except ValueError as error:
        return None, f"the verifier's {error}"
    for other in rewards[1:]:
        if not math.isclose(rewards[0], other, rel_tol=_ROUNDED, abs_tol=_ROUNDED):
            return None, f"the verifier wrote two rewards: {rewards[0]:g} and {other:g}"
    return rewards[0], ""


def _content(files: tarfile.TarFile, name: str, limit: int) -> bytes | None:
    """A file's content, or a byte more than the limit; None if there is no such file."""
    try:
        file = files.extractfile(name)
    except KeyError:
        return None
    return None if file is None else file.read(limit + 1)


def _single_reward(written: bytes) -> float:
    try:
        return float(written.decode("ascii") if len(written) <= _REWARD_BYTES else "")
    except ValueError:
        raise ValueError("reward.txt does not hold one number") from None


def _named_rewards(written: bytes) -> list[float]:
    """The numbers of the name `reward`, or the only number.

    Raises:
        ValueError: it is no object of numbers, or names several and none `reward`.
    """
    if len(written) > _NAMED_REWARDS_BYTES:
        raise ValueError(f"reward.json has more than {_NAMED_REWARDS_BYTES} bytes")
    try:
        members = json.loads(written, object_pairs_hook=_Members)
    except (ValueError, RecursionError):
        raise ValueError("reward.json is not JSON") from None
    if not isinstance(members, _Members) or not all(isinstance(value, int | float) for _, value in members):
        raise ValueError("reward.json does not hold an object of numbers")
    rewards = [value for name, value in members if name == _NAME]
    if not rewards and len(members) == 1:
        rewards = [value for _, value in members]
    if not rewards:
        raise ValueError(f"reward.json names {len(members)} rewards, and none `{_NAME}`")
    try:
        return [float(reward) for reward in rewards]
    except OverflowError:
        raise ValueError("reward is not finite") from None


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object, those with the same name as well."""


def _within_limits(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError("reward is not finite")
    if abs(reward) > REWARD_LIMIT:
        raise ValueError(f"reward {reward:g} is not between -{REWARD_LIMIT:g} and {REWARD_LIMIT:g}")
    return reward


def packed(files: Mapping[str, bytes], executable: Collection[str] = ()) -> bytes:
    """A tar archive of these files; the same for the same files.

    Args:
        executable: which of them can be run by their path.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writing:
        for path in sorted(files):
            info = tarfile.TarInfo(path)
            info.size = len(files[path])
            if path in executable:
                info.mode = 0o755
            writing.addfile(info, io.BytesIO(files[path]))
    return archive.getvalue()
