"""The gate's decision about a candidate, by what its checks found."""

from __future__ import annotations

import logging

from temporalio import activity

from activities.training.messages import REASON_LIMIT, DecideVersion, VersionDecided
from activities.training.ports import GateStore
from clawloop.contracts.training import CheckResult, GateCheck
from clawloop.gate.probes import not_asked
from clawloop.heartbeat import heartbeating

log = logging.getLogger(__name__)


class GateActivities:
    """On the queue `ledger`: short, PostgreSQL only."""

    def __init__(self, store: GateStore) -> None:
        self._store = store

    @activity.defn(name="decide_version")
    async def decide_version(self, request: DecideVersion) -> VersionDecided:
        """Accept or reject a candidate. Idempotent: a version that was decided before keeps its decision."""
        async with heartbeating():
            if request.not_probed:
                await self._store.record(request.policy, request.n, not_asked(request.not_probed))
            checks = await self._store.checks(request.policy, request.n)
            failed = [f"{check.name}: {check.reason}" for check in checks if check.result is CheckResult.FAILED]
            if failed:
                state, reason = await self._store.reject(request.policy, request.n, "; ".join(failed))
            else:
                state, reason = await self._store.accept(request.policy, request.n)
        facts = {"policy": request.policy, "version": request.n, "state": state, "why": reason}
        log.info("version decided", extra=facts)
        return VersionDecided(
            policy=request.policy,
            n=request.n,
            state=state,
            reason=reason[:REASON_LIMIT],
            checks=summary(checks)[:REASON_LIMIT],
        )


def summary(checks: list[GateCheck]) -> str:
    """The checks in one line, e.g. `numbers passed`."""
    return "; ".join(f"{check.name} {check.result.replace('_', ' ')}" for check in checks)
