"""The gate's decision about a candidate, by what its checks found; and about a canary, by its sessions' verdicts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from temporalio import activity

from activities.notify import TrainingNotifier
from activities.training.steps import REASON_LIMIT
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.training import GateCheck, StepState
from clawloop.core.gate.checks import not_asked
from clawloop.core.gate.gate import decide, summary
from clawloop.core.heartbeat import heartbeating

log = logging.getLogger(__name__)

CHECKS_LIMIT = 400  # characters of what the gate's checks found that cross Temporal


class GateStore(Protocol):
    """Decides about candidates.

    Every method is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
    RecordUnusable if the policy or step does not exist.
    """

    async def checks(self, policy: str, n: int) -> list[GateCheck]:
        """The stored checks of a version."""

    async def record(self, policy: str, n: int, check: GateCheck) -> None:
        """Store a check of a candidate; the first one of its name counts. Nothing once it is decided."""

    async def accept(self, policy: str, n: int) -> tuple[StepState, str]:
        """Make a candidate the policy's head, by compare-and-set on its parent and epoch.

        Returns the step's state afterwards, and its reason: abandoned if the policy has moved on, and what was decided
        before if the step is no candidate any more.
        """

    async def reject(self, policy: str, n: int, reason: str) -> tuple[StepState, str]:
        """Reject a candidate and set its samples aside; training pauses after several in a row.

        Returns the step's state afterwards, and its reason: what was decided before if the step is no candidate any
        more.
        """


class DecideVersion(Message):
    """Accept or reject the candidate that step `n` made; the same decision each time.

    Args:
        not_probed: why its probes could not be asked; empty if they were, or there are none.
    """

    policy: str
    n: int
    not_probed: str = ""


class VersionDecided(Message):
    """The gate's decision.

    Args:
        state: committed, rejected, or abandoned because the policy moved on.
        reason: empty for a committed step.
        checks: what the checks found, with their figures, in one line.
    """

    policy: str
    n: int
    state: StepState
    reason: str = ""
    checks: str = ""


class GateActivities:
    """Activities that decide about versions in PostgreSQL; on the queue `ledger`, and where workflows run. Short."""

    def __init__(self, store: GateStore) -> None:
        self._store = store

    @activity.defn
    async def decide_version(self, request: DecideVersion) -> VersionDecided:
        """Accept or reject a candidate. Idempotent: a version that was decided before keeps its decision."""
        async with heartbeating():
            if request.not_probed:
                await self._store.record(request.policy, request.n, not_asked(request.not_probed))
            checks = await self._store.checks(request.policy, request.n)
            rejected = decide(checks)
            if rejected is not None:
                state, reason = await self._store.reject(request.policy, request.n, rejected)
            else:
                state, reason = await self._store.accept(request.policy, request.n)
        facts = {"policy": request.policy, "version": request.n, "state": state, "why": reason}
        log.info("version decided", extra=facts)
        return VersionDecided(
            policy=request.policy,
            n=request.n,
            state=state,
            reason=reason[:REASON_LIMIT],
            checks=summary(checks)[:CHECKS_LIMIT],
        )


class Canaries:
    """Decides about open canaries, as part of the sweep. Calls of the store raise StoreUnavailable.

    Args:
        open_canaries: the policies whose head is a canary that conversations get: without those that are pinned.
        decide: ends the policy's canary if verdicts or time decide: a worse one is rolled back, and counts as a step
            without an accepted version; else all conversations get it. None if there is no canary, it goes on, or a
            version is pinned.
    """

    def __init__(
        self,
        open_canaries: Callable[[], Awaitable[list[str]]],
        decide: Callable[[str], Awaitable[GateCheck | None]],
        training: TrainingNotifier,
    ) -> None:
        self._open_canaries = open_canaries
        self._decide = decide
        self._training = training

    async def decide(self) -> int:
        """Decide each open canary that verdicts or its time limit can decide; returns the number that ended.

        Raises:
            StoreUnavailable
        """
        ended = 0
        for policy in await self._open_canaries():
            check = await self._decide(policy)
            if check is not None:
                ended += 1
                facts = {"policy": policy, "result": check.result, "why": check.reason}
                log.info("canary ended", extra=facts)
                # It publishes the version that answers all from now on, also while training is paused. The sweep
                # notifies it again while another version is active.
                await self._training.notify(policy)
        return ended
