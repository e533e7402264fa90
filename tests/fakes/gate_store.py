"""Decisions about candidates in memory, over the same ledger as the fake step store."""

from __future__ import annotations

from clawloop.core.contracts.training import GateCheck, StepState
from clawloop.core.errors import RecordUnusable
from tests.fakes.ledger import FakeLedger, FakeStep


class FakeGateStore:
    """Satisfies `activities.training.gate.GateStore`."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger

    async def checks(self, policy: str, n: int) -> list[GateCheck]:
        return self._step(policy, n).checks

    async def record(self, policy: str, n: int, check: GateCheck) -> None:
        step = self._step(policy, n)
        if step.state is StepState.CANDIDATE and check.name not in [each.name for each in step.checks]:
            step.checks.append(check)

    async def accept(self, policy: str, n: int) -> tuple[StepState, str]:
        step = self._step(policy, n)
        if step.state is not StepState.CANDIDATE:
            return step.state, step.reason or ""
        policy_row = self.ledger.policies[policy]
        if (policy_row.head, policy_row.epoch) != (step.parent, step.epoch):
            self.ledger.abandon(policy, n, f"the policy moved on to version {policy_row.head}")
            return step.state, step.reason or ""
        self.ledger.end_as_trained(policy, n)
        policy_row.head, policy_row.rejections = n, 0
        return StepState.COMMITTED, ""

    async def reject(self, policy: str, n: int, reason: str) -> tuple[StepState, str]:
        step = self._step(policy, n)
        if step.state is not StepState.CANDIDATE:
            return step.state, step.reason or ""
        self.ledger.set_aside(policy, n, StepState.REJECTED, f"rejected: {reason}")
        return step.state, step.reason or ""

    def _step(self, policy: str, n: int) -> FakeStep:
        self.ledger.require_policy(policy)
        if (policy, n) not in self.ledger.steps:
            raise RecordUnusable(f"policy {policy!r} has no step {n}")
        return self.ledger.steps[policy, n]
