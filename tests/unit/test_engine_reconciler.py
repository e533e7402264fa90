"""Engines' workflows are mended one by one: what cannot be told keeps no other from it."""

from __future__ import annotations

import pytest

from activities.serving.reconcile import EngineReconciler
from clawloop.contracts.serving import Engine
from clawloop.errors import SignalFailed
from tests.fakes.ledger import FakeLedger
from tests.fakes.publishing_store import FakePublishingStore


class Workflows:
    """Satisfies `activities.training.ports.EngineWorkflows`.

    Args:
        stuck: engines whose workflow cannot be told.
    """

    def __init__(self, running: set[str], stuck: set[str]) -> None:
        self.own = running
        self.stuck = stuck

    async def running(self) -> frozenset[str]:
        return frozenset(self.own)

    async def begin(self, engine_id: str) -> None:
        self._tell(engine_id)
        self.own.add(engine_id)

    async def end(self, engine_id: str) -> None:
        self._tell(engine_id)
        self.own.remove(engine_id)

    def _tell(self, engine_id: str) -> None:
        if engine_id in self.stuck:
            raise SignalFailed("Temporal: too many signals")


async def test_an_engine_that_cannot_be_told_keeps_no_other_from_it_and_is_named() -> None:
    ledger = FakeLedger(engines={one: Engine(one, f"http://{one}", {}, draining=False) for one in ("a", "b", "c")})
    workflows = Workflows(running={"c", "x", "y"}, stuck={"a", "x"})
    reconciler = EngineReconciler(FakePublishingStore(ledger), workflows)
    with pytest.raises(SignalFailed, match=r"^engine a: Temporal: too many signals; engine x: Temporal: "):
        await reconciler.reconcile()
    assert workflows.own == {"b", "c", "x"}
    workflows.stuck = set()
    assert await reconciler.reconcile() == 2
    assert workflows.own == {"a", "b", "c"}
