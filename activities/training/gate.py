"""The gate's decision about a candidate, by what its checks found."""

from __future__ import annotations

import logging

from temporalio import activity

from activities.training.messages import CHECKS_LIMIT, REASON_LIMIT, DecideVersion, VersionDecided
from activities.training.ports import GateStore
from clawloop.contracts.gate_checks import SECONDS, CheckName, CheckResult, GateCheck
from clawloop.gate.probes import not_asked
from clawloop.heartbeat import heartbeating

log = logging.getLogger(__name__)

# What a row of the Temporal UI has room for; REST, the command line and the page show all figures.
_SHOWN = {
    CheckName.NUMBERS: ("loss", "grad_norm", "parent_distance", "token_share", "base_distance", SECONDS),
    CheckName.REPLAY: ("praised", "blamed", "change", "upper_bound", SECONDS),
    CheckName.PROBES: (
        *("asked", "right", "parent_right", "base_right", "compared", "preferred", "parent_preferred", SECONDS),
    ),
    CheckName.CANARY: ("sessions", "other_sessions", "change", "radius"),
}


class GateActivities:
    """On the queue `ledger`, and where the workflows run: short, PostgreSQL only."""

    def __init__(self, store: GateStore) -> None:
        self._store = store

    @activity.defn
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
            checks=summary(checks)[:CHECKS_LIMIT],
        )


def summary(checks: list[GateCheck]) -> str:
    """The checks and the figures each was decided by in one line, e.g. `numbers passed: loss 0.1, grad_norm 0.02`."""
    return "; ".join(f"{check.name} {check.result.replace('_', ' ')}{_figures(check)}" for check in checks)


def _figures(check: GateCheck) -> str:
    known = [f"{name} {value:.3g}" for name in _SHOWN[check.name] if (value := check.figures.get(name)) is not None]
    return f": {', '.join(known)}" if known else ""
