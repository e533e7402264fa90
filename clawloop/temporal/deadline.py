"""A time limit for calls of Temporal; however they fail, they raise one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from clawloop.errors import SignalFailed

# A signal takes 10 ms; a server that needs longer than this counts as away, and the sweep retries.
SIGNAL_LIMIT = timedelta(seconds=3)
# An update needs a worker, and takes 20 ms where one runs. An operator's command must not wait for one that does not.
UPDATE_LIMIT = timedelta(seconds=2)


@asynccontextmanager
async def temporal_deadline(limit: timedelta | None = None, *, may_be_gone: bool = False) -> AsyncIterator[None]:
    """Limit the calls of Temporal in the block.

    A call's `rpc_timeout` does not apply while a lazy client connects: where a server accepts the connection and never
    answers, the SDK waits for 30 s.

    Args:
        limit: of all calls in the block; None: SIGNAL_LIMIT.
        may_be_gone: ignore that the workflow does not exist.

    Raises:
        SignalFailed: Temporal does not answer in time, refuses, or cannot be connected to.
    """
    limit = SIGNAL_LIMIT if limit is None else limit
    try:
        async with asyncio.timeout(limit.total_seconds()):
            yield
    except TimeoutError as error:
        raise SignalFailed(f"Temporal: no answer within {limit.total_seconds():g} s") from error
    except (RPCError, RuntimeError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        if may_be_gone and isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
            return
        raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error
