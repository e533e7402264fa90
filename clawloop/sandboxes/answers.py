"""Reads what `inside.py` sends out of a sandbox, none of which can be trusted."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from clawloop.core.errors import SandboxFailed
from clawloop.sandboxes.boxes import BoxResult, Limits

# Problems that `inside.py` writes. Any other text is the command's, and may quote the conversation: it must not pass
# through Temporal and reach terminals.
_PROBLEMS = re.compile(
    r"it left more than \d{1,15} bytes|what it left cannot be read: [A-Z][A-Za-z]{0,30}Error"
    r"|its processes had more than \d{1,15} bytes of memory"
)


async def read_up_to(stream: asyncio.StreamReader, limit: int) -> bytes:
    """All of the stream up to the limit; the rest is read and dropped, so that the writer is not blocked."""
    kept = bytearray()
    while chunk := await stream.read(65536):
        kept += chunk[: max(0, limit - len(kept))]
    return bytes(kept)


def parse_answer(answer: bytes, errors: bytes, limits: Limits) -> BoxResult:
    """
    Args:
        answer: what `inside.py` wrote, or the command in its place.
        errors: of bubblewrap.

    Raises:
        SandboxFailed: bubblewrap made no sandbox.
    """
    first, newline, rest = answer.partition(b"\n")
    if not answer and b"bwrap:" in errors:
        raise SandboxFailed(" ".join(errors.decode(errors="replace").split())[-300:])
    try:
        header = json.loads(first) if newline else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        return BoxResult(-1, answer[-limits.output_bytes :], b"", "the sandbox's first program was killed")
    output, artifact = _size(header.get("output")), _size(header.get("artifact"))
    exit_code, problem = header.get("exit_code"), header.get("problem")
    if output is None or artifact is None or len(rest) != output + artifact or output > limits.output_bytes:
        return BoxResult(-1, b"", b"", "the sandbox's answer is incomplete")
    return BoxResult(
        exit_code if isinstance(exit_code, int) else None,
        rest[:output],
        rest[output:],
        _problem(problem),
    )


def _problem(value: Any) -> str | None:
    if value is None:
        return None
    known = isinstance(value, str) and _PROBLEMS.fullmatch(value)
    return value if known else "the sandbox's answer is not its own"


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
