"""Engines' workflows are reconciled one by one: a failed signal does not stop the others."""

from __future__ import annotations

import pytest

from activities.serving.engines import EngineReconciler
from clawloop.core.contracts.notices import EngineAdded, EngineRemoved, Notice
from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import SignalFailed
from tests.fakes.ledger import FakeLedger
from tests.fakes.publishing_store import FakePublishingStore


class Workflows:
    """Satisfies `Notifier`.

    Args:
        failing: engines whose workflow cannot be signalled.
    """

    def __init__(self, running: set[str], failing: set[str]) -> None:
        self.engines = running
        self.failing = failing

    async def running(self) -> frozenset[str]:
        return frozenset(self.engines)

    async def notify(self, notice: Notice) -> None:
        assert isinstance(notice, EngineAdded | EngineRemoved)
        if notice.engine_id in self.failing:
            raise SignalFailed("Temporal: too many signals")
        if isinstance(notice, EngineAdded):
            self.engines.add(notice.engine_id)
        else:
            self.engines.remove(notice.engine_id)


async def test_a_failed_signal_does_not_stop_the_others_and_is_named() -> None:
    ledger = FakeLedger(engines={one: Engine(one, f"http://{one}", {}, draining=False) for one in ("a", "b", "c")})
    workflows = Workflows(running={"c", "x", "y"}, failing={"a", "x"})
    reconciler = EngineReconciler(FakePublishingStore(ledger), workflows, workflows.running)
    with pytest.raises(SignalFailed, match=r"^engine a: Temporal: too many signals; engine x: Temporal: "):
        await reconciler.reconcile()
    assert workflows.engines == {"b", "c", "x"}
    workflows.failing = set()
    assert await reconciler.reconcile() == 2
    assert workflows.engines == {"a", "b", "c"}
