"""Decides about open canaries, as part of the sweep."""

from __future__ import annotations

import logging

from activities.training.notifier import TrainingNotifier
from activities.training.ports import CanaryStore

log = logging.getLogger(__name__)


class Canaries:
    def __init__(self, store: CanaryStore, training: TrainingNotifier) -> None:
        self._store = store
        self._training = training

    async def decide(self) -> int:
        """Decide about each open canary, as far as verdicts or time do; the number of those that ended.

        Raises:
            StoreUnavailable
        """
        ended = 0
        for policy in await self._store.open():
            decision = await self._store.decide(policy)
            if decision is not None:
                ended += 1
                facts = {"policy": policy, "end": decision.end, "why": decision.check.reason}
                log.info("canary ended", extra=facts)
                # It publishes the version that answers all from now on, also while training is paused. The sweep
                # notifies it again while another version is active.
                await self._training.notify(policy)
        return ended
