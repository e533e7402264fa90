"""Calls of the ledger that are short and come one after the other: made where the workflow runs.

As a local activity a call costs its workflow one event and no task of its own. What does not succeed so at once, e.g.
while PostgreSQL is away, is made as an activity like any other, which waits without adding events, and says why a retry
cannot help.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows.activity_options import LOCAL_STORE, STORE

Argument = TypeVar("Argument")
Result = TypeVar("Result")


async def call_ledger(method: Callable[[Any, Argument], Awaitable[Result]], argument: Argument, summary: str) -> Result:
    """
    Args:
        method: an idempotent activity of the ledger, which the workflows' workers have as well.

    Raises:
        ActivityError: a retry cannot help.
    """
    try:
        return await workflow.execute_local_activity_method(method, argument, summary=summary, **LOCAL_STORE)
    except FailureError as error:
        if is_cancelled_exception(error):
            raise
    return await workflow.execute_activity_method(method, argument, summary=summary, **STORE)
