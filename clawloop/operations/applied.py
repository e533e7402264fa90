"""The result of an operation that PostgreSQL holds, whether or not its workflow could be notified."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawloop.core.errors import SignalFailed

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Applied(Generic[Result]):
    """
    Args:
        signal_error: why the workflow could not be notified; None if it was.
    """

    result: Result
    signal_error: str | None = None


async def notify_best_effort(result: Result, signal: Awaitable[None]) -> Applied[Result]:
    """The result, once its workflow is notified or cannot be."""
    try:
        await signal
    except SignalFailed as error:
        return Applied(result, signal_error=str(error))
    return Applied(result)
