"""Names that a policy may have: they stand in model names, in paths of adapters and in ids of workflows."""

from __future__ import annotations

import re

from clawloop.errors import ValueRejected

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
# `policy` is every key's own policy; `X-side` and `X-v7` are names of its side turns and versions.
_TAKEN = re.compile(r"policy|.*-side|.*-v\d+")


def check_policy_name(name: str) -> str:
    """The name.

    Raises:
        ValueRejected: it cannot be a policy's name.
    """
    if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ValueRejected(
            "A policy's name has up to 63 small letters, digits, `.`, `_` and `-`, and begins with a letter or digit. "
            "It is not `policy`, and ends neither in `-side` nor in `-v` and a number.",
            field="name",
        )
    return name
