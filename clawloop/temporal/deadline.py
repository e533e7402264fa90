"""How Temporal is told something: within a limit, and however it fails it is one error.

Knows nothing about what is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from clawloop.errors import SignalFailed

# A signal takes 10 ms; a server that needs longer than this is as good as away, and the sweep does it.
SIGNAL_LIMIT = timedelta(seconds=3)
# An Update needs a worker; 20 ms where one runs. An operator's command must not wait for one that does not.
UPDATE_LIMIT = timedelta(seconds=2)


@asynccontextmanager
async def temporal_deadline(limit: timedelta = SIGNAL_LIMIT, *, may_be_gone: bool = False) -> AsyncIterator[None]:
    """Inside, Temporal is called.

    A call's own `rpc_timeout` does not count while a lazy client connects: where somebody listens and says nothing, the
    SDK waits for 30 s.

    Args:
        limit: of all that is inside.
        may_be_gone: a workflow that is not there need not be told.

    Raises:
        SignalFailed: it does not answer in time, refuses, or, of a lazy client, nobody could be connected to.
    """
    try:
        async with asyncio.timeout(limit.total_seconds()):
            yield
    except TimeoutError as error:
        raise SignalFailed(f"Temporal: no answer within {limit.total_seconds():g} s") from error
    except (RPCError, RuntimeError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        if may_be_gone and isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
            return
        raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error
